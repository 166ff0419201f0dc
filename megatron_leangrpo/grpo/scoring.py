# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""From final latents to rewards: decode, score, and share the scores with tensor-parallel peers."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron_leangrpo import platform
from megatron_leangrpo.codecs.base import LatentCodec
from megatron_leangrpo.conditioning.prompts import Prompt
from megatron_leangrpo.grpo.placement import Group
from megatron_leangrpo.grpo.trajectory import WaveTrajectory
from megatron_leangrpo.rewards.registry import WeightedReward


class Scorer:
    """Decodes and rewards samples.

    Images and rewards are computed on the first rank of each tensor-parallel group only: its peers
    hold the same latents, and one reward must not differ between them in the last bit.
    """

    def __init__(
        self,
        codec: LatentCodec,
        reward: WeightedReward,
        height: int,
        width: int,
        num_frames: int = 1,
    ) -> None:
        self.codec, self.reward = codec, reward
        self.height, self.width = height, width
        frames = (num_frames,) if codec.makes_videos else ()
        self.sample_shape = (*frames, 3, height, width)
        """Of a decoded picture or video."""
        verdicts = [getattr(r, "verdict", None) for r in reward.rewards.values()]
        self.verdict: str = " and ".join(filter(None, verdicts)) or "correct"
        self.warn: Callable[[str], None] = lambda text: None
        self.names = tuple(reward.weights)
        self.weights = tuple(float(weight) for weight in reward.weights.values())

    def __call__(self, trajectory: WaveTrajectory, groups: Sequence[Group]) -> torch.Tensor:
        """Return the rewards `[b, rewards]` of a wave in float64; NaN where one failed."""
        prompts = [groups[slot.group].prompt for slot in trajectory.wave.slots]
        return self.score(trajectory.latents, prompts)[0]

    @torch.no_grad()
    def score(
        self, latents: torch.Tensor, prompts: Sequence[Prompt]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return rewards `[b, rewards]`, correctness `[b]` and, on one of the ranks that share the
        trajectories, the images `[b, *sample_shape]`.

        Correctness is 1 or 0, or NaN where no reward has a verdict.
        """
        columns = torch.zeros(len(prompts), len(self.names) + 1, dtype=torch.float64)
        images, group = None, platform.trajectory_group()
        if platform.group_rank(group) == 0:
            images = self.codec.decode(latents, self.height, self.width)
            scores = self.reward(
                images, [prompt.text for prompt in prompts], [prompt.metadata for prompt in prompts]
            )
            for failure in scores.failures:
                self.warn(f"{failure}; its group is dropped")
            columns[:, :-1] = torch.stack([scores.parts[name] for name in self.names], dim=1)
            columns[:, -1] = torch.nan if scores.correct is None else scores.correct.double()
        if platform.group_size(group) > 1:
            columns = columns.to(platform.device())
            dist.broadcast(columns, src=dist.get_global_rank(group, 0), group=group)
            columns = columns.cpu()
        return columns[:, :-1], columns[:, -1], images
