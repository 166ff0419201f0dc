# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Sample videos as MP4 files: single ones, captioned grids that play, and before beside after."""

import importlib.util
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace

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
_SMALLEST_SIDE = 160
"""Of a video in pixels: a caption needs the width."""


def can_write_videos() -> bool:
    """Whether the [video] extra is installed; imports nothing."""
    return importlib.util.find_spec("av") is not None


def save_video(path: str | os.PathLike[str], video: Tensor) -> None:
    """Save one video; small ones are enlarged by whole pixels, as players blur them otherwise."""
    pixels = (_enlarged(frame).permute(1, 2, 0).numpy() for frame in to_bytes(video))
    _write(path, pixels, len(video))


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
    return [replace(sample, image=_enlarged(sample.image[frame])) for sample in samples]


def _enlarged(image: Tensor) -> Tensor:
    factor = -(-_SMALLEST_SIDE // min(image.shape[1:]))
    return image.repeat_interleave(factor, 1).repeat_interleave(factor, 2)


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
