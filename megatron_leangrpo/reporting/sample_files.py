# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The files that show a run's samples: grids as PNG and, where the samples are videos, as MP4."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megatron_leangrpo.files import atomic_path
from megatron_leangrpo.reporting.pictures import (
    Sample,
    sample_file_name,
    save_before_after,
    save_grid,
    save_image,
    shrunk,
)
from megatron_leangrpo.reporting.video import (
    INSTALL_LINE,
    can_write_videos,
    save_before_after_video,
    save_grid_video,
    save_video,
)


class SampleFiles:
    """Writes into the folder `samples` of a run directory."""

    def __init__(self, folder: Path, recipe: str, warn: Callable[[str], None]) -> None:
        self.folder, self.recipe, self.warn = folder, recipe, warn
        self._has_warned = False

    def evaluation(self, iteration: int, iterations: int, samples: Sequence[Sample]) -> None:
        """Grids after `iteration` of `iterations`; the last one stands beside the first, too."""
        samples = [shrunk(sample) for sample in samples]
        # In a file, because the run may be resumed before there is an after.
        before = self.folder / ".before.safetensors"
        title = f"{self.recipe}, evaluation after iteration {iteration}"
        self.grid(f"step_{iteration:06d}", samples, title)
        if iteration == 0:
            _store(before, samples)
            self.grid("before", samples, f"{self.recipe}, before")
        if iteration == iterations:
            self.grid("after", samples, f"{self.recipe}, after")
            if before.is_file():
                self._before_after(_load(before), samples)

    def grid(self, name: str, samples: Sequence[Sample], title: str) -> Path:
        """A captioned grid under a name without suffix; returns its picture's path."""
        picture = self.folder / f"{name}.png"
        save_grid(picture, samples, title)
        if self._has_videos(samples):
            save_grid_video(picture.with_suffix(".mp4"), samples, title)
        return picture

    def single(self, prompt_id: int, number: int, sample: Sample) -> None:
        """One sample alone, as large as it is; a video without PyAV is in the grid only."""
        if sample.image.ndim == 3:
            name = sample_file_name(prompt_id, number, sample.prompt)
            save_image(self.folder / name, sample.image)
        elif self._has_videos([sample]):
            name = sample_file_name(prompt_id, number, sample.prompt, ".mp4")
            save_video(self.folder / name, sample.image)

    def _before_after(self, before: Sequence[Sample], after: Sequence[Sample]) -> None:
        title = f"{self.recipe}: the same prompts and noise"
        picture = self.folder / "before_after.png"
        save_before_after(picture, before, after, title)
        if self._has_videos(after):
            save_before_after_video(picture.with_suffix(".mp4"), before, after, title)

    def _has_videos(self, samples: Sequence[Sample]) -> bool:
        """Whether these are videos that can be written; says once how where they cannot."""
        if not samples or samples[0].image.ndim == 3:
            return False
        if not can_write_videos() and not self._has_warned:
            self._has_warned = True
            self.warn(f"MP4 files of the samples need PyAV: {INSTALL_LINE}; PNG files are written")
        return can_write_videos()


def _store(path: Path, samples: Sequence[Sample]) -> None:
    captions = json.dumps([(sample.prompt, sample.reward, sample.correct) for sample in samples])
    with atomic_path(path) as temporary:
        images = torch.stack([sample.image for sample in samples])
        save_file({"images": images}, temporary, {"captions": captions})


def _load(path: Path) -> list[Sample]:
    with safe_open(path, "pt") as file:
        captions = json.loads(file.metadata()["captions"])
        return [Sample(image, *c) for image, c in zip(file.get_tensor("images"), captions)]
