# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Sample videos as MP4 files: single ones, captioned grids that play, and before beside after."""

import dataclasses
import importlib.util
import os
from collections.abc import Iterable, Sequence

import numpy as np
from PIL import Image
from torch import Tensor

from megatron_leangrpo.files import atomic_path
from megatron_leangrpo.reporting.pictures import Sample, before_after_page, grid_page, to_bytes

INSTALL_LINE = "pip install 'megatron-leangrpo[video]'"
FRAMES_PER_SECOND = 16
"""Of Wan 2.1 and 2.2 A14B."""
# libx264's quality: what is left out cannot be seen.
_CONSTANT_RATE_FACTOR = "16"
_SMALLEST_SIDE = 128


def can_write_videos() -> bool:
    """Whether the [video] extra is installed; imports nothing."""
    return importlib.util.find_spec("av") is not None


def save_video(path: str | os.PathLike[str], video: Tensor) -> None:
    """Save one video; small ones are enlarged by whole pixels, as players blur them otherwise."""
    pixels = to_bytes(video).permute(0, 2, 3, 1).numpy()
    factor = -(-_SMALLEST_SIDE // min(pixels.shape[1:3]))
    _write(path, (frame.repeat(factor, 0).repeat(factor, 1) for frame in pixels), len(pixels))


def save_grid_video(path: str | os.PathLike[str], samples: Sequence[Sample], title: str) -> None:
    """Save a captioned grid in which all samples play at once."""
    count = len(samples[0].image)
    _write(path, (_pixels(grid_page(_at(samples, n), title)) for n in range(count)), count)


def save_before_after_video(
    path: str | os.PathLike[str], before: Sequence[Sample], after: Sequence[Sample], title: str
) -> None:
    """Save two grids of the same prompts and noise that play side by side."""
    count = len(after[0].image)
    pages = (before_after_page(_at(before, n), _at(after, n), title) for n in range(count))
    _write(path, map(_pixels, pages), count)


def _at(samples: Sequence[Sample], frame: int) -> list[Sample]:
    return [dataclasses.replace(sample, image=sample.image[frame]) for sample in samples]


def _pixels(page: Image.Image) -> np.ndarray:
    return np.asarray(page)


def _write(path: str | os.PathLike[str], frames: Iterable[np.ndarray], count: int) -> None:
    """Encode [H, W, 3] bytes; a clip of less than a second is slowed down to last one."""
    import av

    with atomic_path(path) as temporary, av.open(temporary, "w") as container:
        stream = None
        for frame in frames:
            # H.264 halves the resolution of colours.
            frame = np.pad(frame, [(0, side % 2) for side in frame.shape[:2]] + [(0, 0)], "edge")
            if stream is None:
                stream = container.add_stream("libx264", min(FRAMES_PER_SECOND, count))
                stream.height, stream.width = frame.shape[:2]
                stream.pix_fmt = "yuv420p"
                stream.options = {"crf": _CONSTANT_RATE_FACTOR}
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
