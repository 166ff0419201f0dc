# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Sample pictures: single files, captioned grids, and before beside after.

A video is shown as a row of its frames, so that a grid of videos is a contact sheet.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from megatron_leangrpo.files import atomic_path, slug

_PAPER, _INK, _FAINT, _GOOD = (255, 255, 255), (32, 33, 36), (120, 124, 130), (24, 128, 56)
_MARGIN, _GAP = 16, 10
_CAPTION, _TITLE, _HEADING = 12, 20, 15
_CELL_SMALLEST, _CELL_LARGEST = 96, 320
_FRAMES_SHOWN, _FRAME_SMALLEST, _FRAME_LARGEST = 5, 64, 160
_GRID_ASPECT, _PANEL_ASPECT = 1.6, 0.8


@dataclass(frozen=True)
class Sample:
    """One sample of a grid, its prompt and, when known, how it scored."""

    image: Tensor
    """[3, H, W], or a video [frames, 3, H, W]: numbers in [0, 1], or bytes"""
    prompt: str
    reward: float | None = None
    correct: bool | None = None


def sample_file_name(prompt_id: int, sample: int, prompt: str, suffix: str = ".png") -> str:
    """Return a file name that is short, safe, and unique by its numbers, not by the prompt."""
    text = slug(prompt)
    return f"{prompt_id:05d}-{sample:02d}{'-' + text if text else ''}{suffix}"


def to_bytes(image: Tensor) -> Tensor:
    """A picture or video as bytes on the host."""
    if image.dtype != torch.uint8:
        image = image.detach().float().clamp(0, 1).mul(255).round().byte()
    return image.cpu()


def shrunk(sample: Sample) -> Sample:
    """The sample as bytes, not larger than a grid shows it."""
    images = sample.image if sample.image.ndim == 4 else sample.image[None]
    if max(images.shape[-2:]) > _CELL_LARGEST:
        cells = [np.asarray(_fit(_to_image(image), 1, _CELL_LARGEST)) for image in images]
        images = torch.from_numpy(np.stack(cells)).permute(0, 3, 1, 2)
    image = to_bytes(images).contiguous()
    return replace(sample, image=image if sample.image.ndim == 4 else image[0])


def save_image(path: str | os.PathLike[str], image: Tensor) -> None:
    """Save a picture as a PNG file."""
    _save(path, _to_image(image))


def save_grid(
    path: str | os.PathLike[str],
    samples: Sequence[Sample],
    title: str,
    columns: int | None = None,
) -> None:
    """Save a captioned grid of samples."""
    _save(path, grid_page(samples, title, columns))


def save_before_after(
    path: str | os.PathLike[str], before: Sequence[Sample], after: Sequence[Sample], title: str
) -> None:
    """Save two grids of the same prompts and noise side by side."""
    _save(path, before_after_page(before, after, title))


def grid_page(samples: Sequence[Sample], title: str, columns: int | None = None) -> Image.Image:
    """A captioned grid under a title."""
    return _page(title, [("", _grid(samples, _GRID_ASPECT, columns))])


def before_after_page(before: Sequence[Sample], after: Sequence[Sample], title: str) -> Image.Image:
    """Two captioned grids beside each other under a title."""
    halves = (("before", before), ("after", after))
    panels = [(f"{name}{_mean(half)}", _grid(half, _PANEL_ASPECT)) for name, half in halves]
    return _page(title, panels)


def _mean(samples: Sequence[Sample]) -> str:
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    verdicts = [sample.correct for sample in samples if sample.correct is not None]
    text = f": mean reward {sum(rewards) / len(rewards):.2f}" if rewards else ""
    return text + (f", {sum(verdicts)} of {len(verdicts)} right" if verdicts else "")


def _columns(count: int, aspect: float) -> int:
    """Columns of a grid about `aspect` times as wide as high, with a full last row if possible."""
    ideal = max(1, min(count, round((count * aspect) ** 0.5)))
    full = [n for n in range(1, count + 1) if count % n == 0 and 0.7 <= n / ideal <= 1.4]
    return min(full, key=lambda n: abs(n - ideal), default=ideal)


def _grid(samples: Sequence[Sample], aspect: float, columns: int | None = None) -> Image.Image:
    pictures = [cell(sample.image) for sample in samples]
    width = max((picture.width for picture in pictures), default=_CELL_SMALLEST)
    height = max((picture.height for picture in pictures), default=_CELL_SMALLEST)
    columns = columns or _columns(len(samples), aspect * height / width)
    caption_height = 2 * (_CAPTION + 3) + 2
    rows = -(-len(samples) // columns)
    grid = Image.new(
        "RGB",
        (
            columns * (width + _GAP) - _GAP,
            max(1, rows * (height + caption_height + _GAP) - _GAP),
        ),
        _PAPER,
    )
    draw = ImageDraw.Draw(grid)
    for index, (sample, picture) in enumerate(zip(samples, pictures)):
        left = (index % columns) * (width + _GAP)
        top = (index // columns) * (height + caption_height + _GAP)
        grid.paste(picture, (left + (width - picture.width) // 2, top))
        _draw_caption(draw, sample, left, top + height + 3, width)
    return grid


def _draw_caption(
    draw: ImageDraw.ImageDraw, sample: Sample, left: int, top: int, width: int
) -> None:
    font = _font(_CAPTION)
    draw.text((left, top), _shorten(sample.prompt, font, width), font=font, fill=_INK)
    if sample.reward is None:
        return
    score = f"{sample.reward:.2f}"
    draw.text((left, top + _CAPTION + 3), score, font=font, fill=_FAINT)
    if sample.correct:
        # Drawn, because the built-in font has no tick.
        x, y = left + font.getlength(score) + 6, top + _CAPTION + 11
        draw.line([(x, y), (x + 3, y + 4), (x + 10, y - 4)], fill=_GOOD, width=2, joint="curve")


def _shorten(text: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    text = " ".join(text.split())
    if font.getlength(text) <= width:
        return text
    # A long text is cut before it is measured: a 5000-letter word takes seconds to lay out.
    text = text[: width // 2]
    while text and font.getlength(text + "...") > width:
        text = text[:-1]
    return text.rstrip() + "..."


def _page(title: str, panels: Sequence[tuple[str, Image.Image]]) -> Image.Image:
    """Lay panels with their headings side by side under a title."""
    separation = 3 * _GAP
    heading_height = _HEADING + 12 if any(heading for heading, _ in panels) else 0
    top = _MARGIN + _TITLE + 16
    inner = sum(panel.width for _, panel in panels) + separation * (len(panels) - 1)
    title_width = int(_font(_TITLE).getlength(title))
    width = max(inner, min(title_width, 1200)) + 2 * _MARGIN
    height = top + heading_height + max(panel.height for _, panel in panels) + _MARGIN
    page = Image.new("RGB", (width, height), _PAPER)
    draw = ImageDraw.Draw(page)
    font = _font(_TITLE)
    draw.text((_MARGIN, _MARGIN), _shorten(title, font, width), font=font, fill=_INK)
    left = _MARGIN
    for heading, panel in panels:
        draw.text((left, top), heading, font=_font(_HEADING), fill=_INK)
        page.paste(panel, (left, top + heading_height))
        left += panel.width + separation
        if left < width - _MARGIN:
            middle = left - separation // 2
            draw.line([(middle, top), (middle, height - _MARGIN)], fill=(218, 220, 224))
    return page


def cell(image: Tensor) -> Image.Image:
    """A picture, or frames of a video from its first to its last in a row."""
    if image.ndim == 3:
        return _fit(_to_image(image), _CELL_SMALLEST, _CELL_LARGEST)
    last, count = len(image) - 1, min(len(image), _FRAMES_SHOWN)
    shown = [round(n * last / max(1, count - 1)) for n in range(count)]
    frames = [_fit(_to_image(image[n]), _FRAME_SMALLEST, _FRAME_LARGEST) for n in shown]
    width, height = frames[0].size
    row = Image.new("RGB", (count * (width + 2) - 2, height), _PAPER)
    for position, frame in enumerate(frames):
        row.paste(frame, (position * (width + 2), 0))
    return row


def _fit(picture: Image.Image, smallest: int, largest: int) -> Image.Image:
    """Enlarge small pictures by whole pixels and shrink large ones, keeping their shape."""
    longest = max(picture.size)
    if longest < smallest:
        factor = -(-smallest // longest)
        return picture.resize((picture.width * factor, picture.height * factor), Image.NEAREST)
    if longest > largest:
        picture = picture.copy()
        picture.thumbnail((largest, largest), Image.LANCZOS)
    return picture


def _to_image(image: Tensor) -> Image.Image:
    return Image.fromarray(np.ascontiguousarray(to_bytes(image).permute(1, 2, 0).numpy()))


@lru_cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    # Pillow's built-in outline font: no font file has to be found on the machine.
    return ImageFont.load_default(size)


def _save(path: str | os.PathLike[str], picture: Image.Image) -> None:
    with atomic_path(path) as temporary:
        picture.save(temporary)
