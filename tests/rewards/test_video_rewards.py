# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Rewards of videos, and rewards of pictures on their frames."""

import pytest
import torch

from megatron_leangrpo.build_tiny.rendering import draw_clip, motion_task
from megatron_leangrpo.conditioning.prompts import Prompt
from megatron_leangrpo.rewards import RewardError, RewardScores, WeightedReward, build_reward
from megatron_leangrpo.rewards.color_motion import ColorMotionReward, displacement
from megatron_leangrpo.rewards.motion import motion_smoothness, static_video, temporal_flicker

TASK = motion_task()


def rendered(seed=0):
    """A clip of each prompt: [16, frames, 3, 32, 32]."""
    return TASK.render(list(range(16)), seed).transpose(1, 2)


def color_motion(videos, prompts=TASK.prompts):
    return ColorMotionReward()(videos, prompts, [{}] * len(prompts))


def test_rendered_clips_are_right_and_score_high():
    for seed in range(4):
        result = color_motion(rendered(seed))
        assert result.correct.all() and (result.scores > 0.9).all()


def test_clips_of_other_prompts_score_low():
    videos = rendered()
    for shift in range(1, 16):
        result = color_motion(videos.roll(shift, 0))
        assert not result.correct.any() and (result.scores < 0.2).all()


def test_a_clip_played_backwards_moves_the_other_way():
    videos = rendered().flip(1)
    opposite = [
        p.replace("left", "*").replace("right", "left").replace("*", "right") for p in TASK.prompts
    ]
    swapped = [p.replace("up", "*").replace("down", "up").replace("*", "down") for p in opposite]
    assert color_motion(videos, swapped).correct.all()
    assert not color_motion(videos).correct.any()


def test_still_and_empty_clips_are_wrong():
    still = rendered()[:, :1].expand(-1, 9, -1, -1, -1)
    assert not color_motion(still).correct.any()
    assert (color_motion(still).scores < 0.3).all()
    empty = color_motion(torch.full((16, 9, 3, 32, 32), 0.9))
    # The soft mask is never quite 0.
    assert not empty.correct.any() and (empty.scores < 0.05).all() and empty.scores.isfinite().all()


def test_the_score_rises_with_the_way():
    clip = rendered()[:1]
    # The first frames alone, slowed down: a shorter way in the same time.
    slower = [clip[:, torch.arange(9) * last // 8] for last in (0, 2, 4, 8)]
    scores = torch.cat([color_motion(video, TASK.prompts[:1]).scores for video in slower])
    assert (scores.diff() > 0).all()


def test_displacement_leaves_absent_frames_out():
    centers = torch.linspace(0.3, 0.7, 9)[None, :, None].repeat(1, 1, 2)
    weights = torch.ones(1, 9)
    torch.testing.assert_close(displacement(centers, weights), torch.full((1, 2), 0.4))
    centers[0, 4], weights[0, 4] = 99.0, 0.0
    torch.testing.assert_close(displacement(centers, weights), torch.full((1, 2), 0.4))


def test_prompts_without_colour_or_direction_are_refused_with_their_line():
    prompts = [Prompt(0, "a red circle moving left"), Prompt(4, "a pink circle moving left")]
    with pytest.raises(ValueError, match=r"motion\.jsonl:5: names 0 colors, must be one of red"):
        ColorMotionReward().validate(prompts, "motion.jsonl")
    ColorMotionReward().validate([Prompt(0, "x", {"color": "red", "direction": "up"})], "f")


def ramp(steps):
    """Grey videos with the given brightness of each frame."""
    return torch.tensor(steps)[None, :, None, None, None].expand(1, -1, 3, 4, 4)


def test_motion_rewards_by_hand():
    even, jumping, still = ramp([0.0, 0.1, 0.2]), ramp([0.0, 0.3, 0.0]), ramp([0.5, 0.5, 0.5])
    torch.testing.assert_close(temporal_flicker(even), torch.tensor([0.9]))
    torch.testing.assert_close(temporal_flicker(jumping), torch.tensor([0.7]))
    torch.testing.assert_close(motion_smoothness(even), torch.tensor([1.0]))
    torch.testing.assert_close(motion_smoothness(jumping), torch.tensor([0.7]))
    assert temporal_flicker(still) == motion_smoothness(still) == 1
    # Half a step of 8 bits a frame is half a penalty.
    barely = ramp([0.0, 0.5 / 255, 1.0 / 255])
    values = torch.cat([static_video(video) for video in (even, still, barely)])
    torch.testing.assert_close(values, torch.tensor([0.0, -1.0, -0.5]))


@pytest.mark.parametrize(("name", "least"), [("temporal_flicker", 2), ("motion_smoothness", 3)])
def test_too_short_videos_are_refused(name, least):
    reward = build_reward({name: 1.0})
    with pytest.raises(RewardError, match=f"needs {least} frames or more"):
        reward(torch.rand(1, least - 1, 3, 4, 4), ["p"], [{}])
    assert reward(torch.rand(1, least, 3, 4, 4), ["p"], [{}]).total.isfinite().all()


def test_a_reward_of_videos_is_refused_where_pictures_are_made():
    reward = build_reward({"static_video": 1.0, "color_shape": 1.0})
    reward.check_medium(videos=True)
    with pytest.raises(ValueError, match=r"reward\.weights: static_video scores videos"):
        reward.check_medium(videos=False)
    build_reward({"color_shape": 1.0}).check_medium(videos=False)


class FirstPixel:
    """Scores a picture by one pixel and calls it right above a half."""

    def __call__(self, images, prompts, metadata):
        assert images.ndim == 4 and len(images) == len(prompts) == len(metadata)
        scores = images[:, 0, 0, 0]
        return RewardScores(scores, scores > 0.5)


@pytest.mark.parametrize(
    ("interval", "expected"), [(0, [0.0, 0.8]), (1, [0.2, 0.6]), (2, [0.2, 0.6]), (4, [0.2, 0.6])]
)
def test_pictures_rewards_score_chosen_frames_and_average(interval, expected):
    up, down = torch.linspace(0, 0.4, 5), torch.linspace(0.8, 0.4, 5)
    videos = torch.stack([up, down])[:, :, None, None, None].expand(-1, -1, 3, 2, 2)
    reward = WeightedReward({"pixel": FirstPixel()}, {"pixel": 1.0}, frame_interval=interval)
    result = reward(videos, ["a", "b"], [{}, {}])
    torch.testing.assert_close(result.total, torch.tensor(expected, dtype=torch.float64))
    # Right is a video whose frames all are.
    assert result.correct.tolist() == [False, interval == 0]


def test_which_frames_are_scored():
    seen = []

    def watch(images, prompts, metadata):
        seen.append(images[:, 0, 0, 0].tolist())
        return images.mean((1, 2, 3))

    video = torch.arange(9.0)[None, :, None, None, None].expand(1, -1, 3, 2, 2)
    for interval in (0, 4, 3):
        WeightedReward({"r": watch}, {"r": 1.0}, frame_interval=interval)(video, ["p"], [{}])
    assert seen == [[0], [0, 4, 8], [0, 3, 6]]


def test_a_frame_that_fails_costs_its_video_alone():
    def fails_on_black(images, prompts, metadata):
        if (images == 0).flatten(1).all(1).any():
            raise ValueError("black")
        return images.mean((1, 2, 3))

    videos = torch.full((3, 5, 3, 2, 2), 0.5)
    videos[1, 4] = 0
    reward = WeightedReward({"r": fails_on_black}, {"r": 1.0}, failure_policy="drop_group")
    result = reward(videos, ["a", "b", "c"], [{}] * 3)
    assert result.total.isnan().tolist() == [False, True, False] and len(result.failures) == 1


def test_negative_frame_interval_is_refused():
    with pytest.raises(ValueError, match=r"reward\.frame_interval = -1 must be 0 .* or more"):
        build_reward({"color_shape": 1.0}, frame_interval=-1)


def test_clips_are_drawn_at_constant_speed():
    import random

    clip = draw_clip(1, random.Random(0)).transpose(0, 1)
    _, moved, presence = ColorMotionReward().measure(clip[None])
    assert 9 / 32 <= moved[0, 0] <= 12 / 32 and moved[0, 1].abs() < 0.01 and presence == 1
    assert motion_smoothness(clip[None]) > 0.98 and static_video(clip[None]) == 0
