# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Videos from the embedded Wan base, as files and under rewards of pictures and videos."""

import pytest

RECIPE = """
model: {family: wan, base: wan_motion, max_text_tokens: 8}
sampling: {height: 32, width: 48, num_frames: 5, num_steps: 2, sigma_schedule: static_shift,
  shift: 1.0}
reward: {weights: {static_video: 1.0, color_shape: 1.0}}
prompts: {train: prompts.txt}
evaluation: {num_steps: 2, samples_per_prompt: 1, grid_images: 2}
"""


@pytest.fixture
def recipe(leangrpo, tmp_path):
    (tmp_path / "here" / "prompts.txt").write_text("a red circle\na blue circle\n")
    path = tmp_path / "here" / "video.yaml"
    path.write_text(RECIPE)
    return str(path)


def test_sampled_videos_are_files_of_their_own_and_a_contact_sheet(leangrpo, recipe, tmp_path):
    av = pytest.importorskip("av")
    outcome = leangrpo("sample", recipe, "--output=out")
    assert outcome.status == 0, outcome
    assert "2 samples in out/samples" in outcome.out
    folder = tmp_path / "here" / "out" / "samples"
    assert {path.name for path in folder.iterdir()} == {
        "00000-00-a-red-circle.mp4",
        "00001-00-a-blue-circle.mp4",
        "grid.png",
        "grid.mp4",
    }
    with av.open(folder / "00000-00-a-red-circle.mp4") as container:
        frames = list(container.decode(video=0))
    # Enlarged by 5, the sides in their places.
    assert [(frame.height, frame.width) for frame in frames] == [(160, 240)] * 5


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ("--sampling.num_frames=8", ["sampling.num_frames = 8", "5 or 9"]),
        ("--sampling.height=36", ["sampling.height=36", "multiple of 8", "32 or 40"]),
        ("--model.max_text_tokens=513", ["model.max_text_tokens = 513", "1 to 512"]),
        ("--reward.frame_interval=-1", ["reward.frame_interval = -1", "0 (the first frame)"]),
    ],
)
def test_what_a_video_cannot_be_is_refused_in_one_line(leangrpo, recipe, change, parts):
    leangrpo.refuses(parts, "sample", recipe, change)


def test_a_reward_of_videos_is_refused_for_pictures(leangrpo, recipe):
    leangrpo.refuses(
        ["reward.weights", "static_video scores videos"],
        "sample",
        "flux_tiny_shapes",
        "--reward.weights.static_video=1.0",
    )
