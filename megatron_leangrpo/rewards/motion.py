# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Rewards of a video's motion that need no weights, from frame differences alone.

A still video is perfectly smooth and never flickers: give `static_video` a weight beside them.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from megatron_leangrpo.rewards.registry import register_reward

# Mean change a pixel and frame, in steps of 8 bits, below which a video counts as still in part.
STILL_STEPS = 1.0


def frame_changes(videos: Tensor) -> Tensor:
    """Mean absolute change [n] from a frame to the next, of videos [n, frames, 3, H, W]."""
    return (videos[:, 1:] - videos[:, :-1]).abs().flatten(1).mean(1)


def temporal_flicker(videos: Tensor) -> Tensor:
    """VBench's temporal flickering: 1 minus the mean change between frames; 1 is a still video."""
    return 1 - frame_changes(videos)


def motion_smoothness(videos: Tensor) -> Tensor:
    """1 minus the mean distance of a frame from the average of its neighbours.

    VBench's rule with the average in place of an interpolation network.
    """
    middle = (videos[:, 2:] + videos[:, :-2]) / 2
    return 1 - (videos[:, 1:-1] - middle).abs().flatten(1).mean(1)


def static_video(videos: Tensor) -> Tensor:
    """0 for a video that moves, down to -1 for one whose frames are all the same."""
    return (frame_changes(videos) * 255 / STILL_STEPS).clamp(max=1) - 1


class MotionReward:
    """A function of the frames alone."""

    takes_videos = True

    def __init__(self, measure: Callable[[Tensor], Tensor], least_frames: int) -> None:
        self.measure, self.least_frames = measure, least_frames

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> Tensor:
        if images.shape[1] < self.least_frames:
            raise ValueError(
                f"sampling.num_frames = {images.shape[1]}: this reward needs {self.least_frames} "
                "frames or more"
            )
        return self.measure(images.detach().float()).double()


register_reward("temporal_flicker")(lambda: MotionReward(temporal_flicker, 2))
register_reward("motion_smoothness")(lambda: MotionReward(motion_smoothness, 3))
register_reward("static_video")(lambda: MotionReward(static_video, 2))
