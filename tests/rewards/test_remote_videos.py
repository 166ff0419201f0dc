# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Videos on their way to a reward server and back."""

import json

import pytest
import torch

from megatron_leangrpo.rewards import RewardScores, build_reward, make_reward
from megatron_leangrpo.rewards.wire import encode_picture

httpx = pytest.importorskip("httpx")
pytest.importorskip("tenacity")
pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")

from megatron_leangrpo.rewards.remote import RemoteSettings, remote_rewards  # noqa: E402
from megatron_leangrpo.rewards.server import Limits, create_app  # noqa: E402
from tests.rewards.http_server import serve  # noqa: E402

VIDEOS = torch.rand(5, 3, 3, 8, 12, generator=torch.Generator().manual_seed(0))
PROMPTS = ["a red circle moving left"] * 5
METADATA = [{"color": "red", "shape": "circle"}] * 5
WEIGHTS = {"color_motion": 1.0, "static_video": 0.5, "color_shape": 1.0, "jpeg_compressibility": 1}


class FrameOrder:
    """A score that any other order of pixels, frames or videos changes."""

    takes_videos = True

    def __call__(self, images, prompts, metadata):
        ramp = torch.arange(images[0].numel(), dtype=torch.float64).sin()
        # One by one: a product with other rows beside it may add in another order.
        return RewardScores(torch.stack([video.double().flatten() @ ramp for video in images]))


@pytest.fixture(scope="module")
def url():
    rewards = {name: make_reward(name) for name in WEIGHTS}
    rewards["frame_order"] = FrameOrder()
    # Two videos of three frames fit into a request.
    with serve(create_app(rewards, limits=Limits(max_images=7))) as address:
        yield address


def remote(url, names):
    settings = RemoteSettings(url, timeout_seconds=20, deadline_seconds=60, retries=1)
    return remote_rewards(names, settings)


def test_remote_scores_of_videos_equal_local_ones_bit_for_bit(url):
    there = remote(url, ["frame_order"])["frame_order"](VIDEOS, PROMPTS, METADATA)
    assert torch.equal(there.scores, FrameOrder()(VIDEOS, PROMPTS, METADATA).scores)


@pytest.mark.parametrize("interval", [0, 2])
def test_rewards_of_videos_and_of_frames_score_as_they_do_locally(url, interval):
    here = build_reward(WEIGHTS, frame_interval=interval)
    there = build_reward(WEIGHTS, remote=remote(url, list(WEIGHTS)), frame_interval=interval)
    there.validate([], "prompts.txt")
    there.check_medium(videos=True)
    expected, found = (reward(VIDEOS, PROMPTS, METADATA) for reward in (here, there))
    assert torch.equal(expected.total, found.total)
    assert torch.equal(expected.correct, found.correct)


def test_a_video_reward_of_the_server_is_refused_where_pictures_are_made(url):
    there = build_reward({"static_video": 1.0}, remote=remote(url, ["static_video"]))
    with pytest.raises(ValueError, match="static_video scores videos"):
        there.check_medium(videos=False)


def test_a_video_larger_than_a_request_names_the_limit(url):
    reward = build_reward({"static_video": 1.0}, "drop_group", remote=remote(url, ["static_video"]))
    result = reward(torch.rand(2, 8, 3, 4, 4), PROMPTS[:2], METADATA[:2])
    assert result.total.isnan().all()
    assert "may have 7 images" in str(result.failures[0])


@pytest.mark.parametrize(
    ("reward", "change", "message"),
    [
        ("frame_order", {"frames": 4}, "6 and 2 and 2 pictures"),
        ("frame_order", {"frames": None}, "frame_order scores videos: frames must be set"),
        ("frame_order", {"frames": 0}, "frames"),
        ("color_shape", {"frames": 3}, "color_shape scores pictures: no frames"),
    ],
)
def test_frames_that_do_not_fit_are_refused(url, reward, change, message):
    request = {
        "id": "1",
        "reward": reward,
        "frames": 3,
        "pictures": [encode_picture(frame, "png") for frame in VIDEOS[:2].flatten(0, 1)],
        "prompts": PROMPTS[:2],
        "metadata": METADATA[:2],
        "timeout_seconds": 10.0,
    }
    response = httpx.post(f"{url}/score", content=json.dumps(request | change), trust_env=False)
    assert response.status_code == 422
    assert message.replace(" and ", ", ", 1) in response.json()["error"]["message"]
