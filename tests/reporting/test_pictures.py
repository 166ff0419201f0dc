# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Picture files: names, sizes, and content."""

import numpy as np
import pytest
import torch
from PIL import Image

from megatron_leangrpo.reporting.pictures import (
    Sample,
    sample_file_name,
    save_before_after,
    save_grid,
    save_image,
    shrunk,
)

HOSTILE = [
    "y" * 300,
    "a/b/c ../d",
    ".hidden",
    "The Number 7",
    "the number 7",
    "con",
    "trailing dot.",
    "\x00\n",
    "数字七",
    "🙂" * 200,
]


def test_file_names_are_short_safe_and_unique():
    names = [sample_file_name(index, 0, prompt) for index, prompt in enumerate(HOSTILE)]
    assert len({name.lower() for name in names}) == len(HOSTILE)
    for name in names:
        assert len(name.encode()) < 255
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-.")
        assert not name.startswith(".")
    assert sample_file_name(3, 12, "the number 7") == "00003-12-the-number-7.png"


def test_a_picture_is_saved_pixel_by_pixel_with_height_and_width_in_place(tmp_path):
    image = torch.rand(3, 4, 6)
    save_image(tmp_path / "a.png", image)
    saved = np.asarray(Image.open(tmp_path / "a.png"))
    np.testing.assert_array_equal(saved, (image * 255).round().byte().permute(1, 2, 0).numpy())


def test_values_outside_the_range_are_clamped_not_wrapped(tmp_path):
    save_image(tmp_path / "a.png", torch.tensor([-0.5, 0.5, 1.5]).reshape(3, 1, 1))
    assert Image.open(tmp_path / "a.png").getpixel((0, 0)) == (0, 128, 255)


def samples(count: int, height: int = 8, width: int = 8, prompt: str = "the number 7"):
    return [Sample(torch.rand(3, height, width), prompt, 0.5, n % 2 == 0) for n in range(count)]


@pytest.mark.parametrize("count", [1, 7, 40])
def test_a_grid_shows_every_sample(tmp_path, count):
    marked = [Sample(torch.tensor([1.0, 0, 0]).reshape(3, 1, 1).expand(3, 8, 8), "p")] * count
    save_grid(tmp_path / "grid.png", marked, "title")
    pixels = np.asarray(Image.open(tmp_path / "grid.png")).astype(int)
    # 8 pixels are enlarged by 12 to fill a cell of 96.
    assert (pixels == [255, 0, 0]).all(axis=-1).sum() == count * 96 * 96


def test_before_and_after_stand_side_by_side(tmp_path):
    save_grid(tmp_path / "one.png", samples(40), "title", columns=5)
    save_before_after(tmp_path / "two.png", samples(40), samples(40), "title")
    one, two = Image.open(tmp_path / "one.png"), Image.open(tmp_path / "two.png")
    assert two.width > 1.9 * one.width
    assert abs(two.height - one.height) < 40


def test_a_video_is_a_row_of_its_frames_from_the_first_to_the_last(tmp_path):
    video = torch.linspace(0, 1, 9).view(9, 1, 1, 1).expand(9, 3, 32, 32)
    save_grid(tmp_path / "grid.png", [Sample(video, "p", 0.5, True)], "title")
    pixels = np.asarray(Image.open(tmp_path / "grid.png"))
    # 32 pixels are enlarged by 2; 2 pixels are between frames.
    row = next(line for line in pixels[..., 0] if (line == 0).sum() >= 64)
    first = int((row == 0).argmax())
    shown = [int(row[first + 66 * n]) for n in range(5)]
    assert shown == [round(255 * n / 4) for n in range(5)]


def test_shrunk_samples_give_the_same_grid(tmp_path):
    large = [Sample(torch.rand(3, 256, 1024), "p"), Sample(torch.rand(3, 256, 1024), "q")]
    save_grid(tmp_path / "a.png", large, "title")
    small = [shrunk(sample) for sample in large]
    assert small[0].image.shape == (3, 80, 320) and small[0].image.dtype == torch.uint8
    save_grid(tmp_path / "b.png", small, "title")
    a, b = (np.asarray(Image.open(tmp_path / name)) for name in ("a.png", "b.png"))
    np.testing.assert_array_equal(a, b)


def test_large_pictures_are_shrunk_in_proportion(tmp_path):
    save_grid(tmp_path / "grid.png", samples(2, 256, 1024), "title", columns=1)
    assert 320 <= Image.open(tmp_path / "grid.png").width < 400


def test_prompts_of_any_length_fit_a_caption_and_only_the_picture_is_left(tmp_path):
    prompts = [*HOSTILE, "x" * 5000, "", "[bold]", " ".join(["word"] * 700)]
    hostile = [Sample(torch.rand(3, 8, 8), prompt, -1.0) for prompt in prompts]
    save_grid(tmp_path / "grid.png", hostile, "t" * 3000)
    assert [entry.name for entry in tmp_path.iterdir()] == ["grid.png"]
    assert Image.open(tmp_path / "grid.png").width < 1400
