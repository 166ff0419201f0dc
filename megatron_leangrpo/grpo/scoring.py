# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""From final latents to rewards: decode, score, and share the scores with tensor-parallel peers."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext

import torch
import torch.distributed as dist

from megatron_leangrpo import platform
from megatron_leangrpo.codecs.base import LatentCodec
from megatron_leangrpo.conditioning.prompts import Prompt
from megatron_leangrpo.grpo.placement import Group
from megatron_leangrpo.grpo.trajectory import WaveTrajectory
from megatron_leangrpo.rewards.registry import WeightedReward, WeightedScores


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
        self._thread = ThreadPoolExecutor(1, "rewards")
        self.height, self.width = height, width
        frames = (num_frames,) if codec.makes_videos else ()
        self.sample_shape = (*frames, 3, height, width)
        """Of a decoded picture or video."""
        verdicts = [getattr(r, "verdict", None) for r in reward.rewards.values()]
        self.verdict: str = " and ".join(filter(None, verdicts)) or "correct"
        self.warn: Callable[[str], None] = lambda text: None
        self.names = tuple(reward.weights)
        self.weights = tuple(float(weight) for weight in reward.weights.values())

    def submit(
        self, trajectory: WaveTrajectory, groups: Sequence[Group]
    ) -> Callable[[], torch.Tensor]:
        """Decode a wave and score it on a thread of its own.

        The function returned waits for the rewards `[b, rewards]` in float64, NaN where one failed,
        and shares them; ranks that share trajectories call it at the same place.
        """
        prompts = [groups[slot.group].prompt for slot in trajectory.wave.slots]
        pictures, scores = self._submit(trajectory.latents, prompts)

        def finish() -> torch.Tensor:
            rewards, _ = self._shared(scores, len(prompts))
            # Freed here: the caller trains with this function at hand, and what another thread
            # frees is unknown to torch's profiler, with which peaks are measured on a CPU.
            pictures.clear()
            return rewards

        return finish

    def score(
        self, latents: torch.Tensor, prompts: Sequence[Prompt]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return rewards `[b, rewards]`, correctness `[b]` and, on one of the ranks that share the
        trajectories, the images `[b, *sample_shape]`.

        Correctness is 1 or 0, or NaN where no reward has a verdict.
        """
        pictures, scores = self._submit(latents, prompts)
        return *self._shared(scores, len(prompts)), pictures[0] if pictures else None

    @torch.no_grad()
    def _submit(
        self, latents: torch.Tensor, prompts: Sequence[Prompt]
    ) -> "tuple[list[torch.Tensor], Future[WeightedScores] | None]":
        """A list of a batch of pictures, and their scores to come; nothing on other ranks."""
        if platform.group_rank(platform.trajectory_group()) != 0:
            return [], None
        pictures = [self.codec.decode(latents, self.height, self.width)]
        return pictures, self._thread.submit(self._reward, pictures, prompts)

    @torch.no_grad()
    def _reward(self, pictures: list[torch.Tensor], prompts: Sequence[Prompt]) -> WeightedScores:
        # The current device is a thread's own.
        device = platform.device()
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            texts = [prompt.text for prompt in prompts]
            return self.reward(pictures[0], texts, [prompt.metadata for prompt in prompts])

    def _shared(
        self, waiting: "Future[WeightedScores] | None", count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rewards and correctness on every rank that shares the trajectories."""
        columns = torch.zeros(count, len(self.names) + 1, dtype=torch.float64)
        group = platform.trajectory_group()
        if waiting is not None:
            scores = waiting.result()
            for failure in scores.failures:
                self.warn(f"{failure}; its group is dropped")
            columns[:, :-1] = torch.stack([scores.parts[name] for name in self.names], dim=1)
            columns[:, -1] = torch.nan if scores.correct is None else scores.correct.double()
        if platform.group_size(group) > 1:
            columns = columns.to(platform.device())
            dist.broadcast(columns, src=dist.get_global_rank(group, 0), group=group)
            columns = columns.cpu()
        return columns[:, :-1], columns[:, -1]
