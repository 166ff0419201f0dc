# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Signs that a policy pleases its rewards and not the eye, measured against the base.

Three measures: how far a periodic pattern stands out of the spectrum (grid artefacts), how
different the samples of one prompt are (diversity), and how far a sample has moved from the base's
of the same noise (distance). Distances are root mean squares over coarse pictures in [0, 1].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megatron_leangrpo.grpo.intervals import Interval, mean_over_prompts

# Pixels a side of the pictures that are compared: layout and colour, not texture.
_COARSE = 32
# Below this share of the sampling frequency a picture's own content is steep.
_LOWEST_FREQUENCY = 0.06
_NEIGHBOURHOOD, _CENTRE = 9, 3

GRID_FACTOR = 2.0
"""Grid artefacts: the peak stands this many times higher above its surroundings than the base's."""
DIVERSITY_SHARE = 0.7
"""Diversity lost: samples of a prompt differ less than this share of the base's."""
DISTANCE_SHARE = 1.0
"""Far from the base: moved by more than this times what two of its samples differ."""


@dataclass(frozen=True)
class Measures:
    """What one model's samples are like; over prompts."""

    grid: Interval
    """Decimal logarithm of the highest peak of the spectrum over its surroundings."""
    diversity: Interval | None
    """Distance between two samples of a prompt; None where a prompt has one."""
    distance: Interval
    """Distance from the base's sample of the same noise; 0 for the base."""


@torch.no_grad()
def inspect(images: torch.Tensor) -> torch.Tensor:
    """Samples `[b, 3, H, W]` or `[b, frames, 3, H, W]` to what `compare` needs of each."""
    frames = images[:, None] if images.ndim == 4 else images
    flat = frames.flatten(0, 1).float()
    grid = peak_over_surroundings(flat).unflatten(0, frames.shape[:2]).mean(dim=1)
    coarse = F.adaptive_avg_pool2d(frames[:, frames.shape[1] // 2].float(), _COARSE)
    return torch.cat([grid[:, None], coarse.flatten(1)], dim=1)


def peak_over_surroundings(images: torch.Tensor) -> torch.Tensor:
    """Decimal logarithm of the highest peak of each picture's spectrum over the mean around it.

    A pattern that repeats is one point of the spectrum; what a picture shows is spread over it.
    """
    grey = images.mean(dim=1)
    height, width = grey.shape[-2:]
    window = torch.outer(_hann(height), _hann(width)).to(grey.device)
    mean = (grey * window).sum((1, 2), keepdim=True) / window.sum()
    spectrum = torch.fft.fft2((grey - mean) * window).abs().square()
    # A picture without any content has no peaks.
    logarithm = torch.log10(spectrum + 1e-6 * height * width)[:, None]
    padded = F.pad(logarithm, (_NEIGHBOURHOOD // 2,) * 4, mode="circular")
    wide = F.avg_pool2d(padded, _NEIGHBOURHOOD, stride=1) * _NEIGHBOURHOOD**2
    padded = F.pad(logarithm, (_CENTRE // 2,) * 4, mode="circular")
    near = F.avg_pool2d(padded, _CENTRE, stride=1) * _CENTRE**2
    above = (logarithm - (wide - near) / (_NEIGHBOURHOOD**2 - _CENTRE**2))[:, 0]
    rows, columns = torch.fft.fftfreq(height), torch.fft.fftfreq(width)
    is_low = (rows[:, None].square() + columns.square()).sqrt() < _LOWEST_FREQUENCY
    return above.masked_fill(is_low.to(above.device), -math.inf).amax((1, 2))


def measure(
    own: torch.Tensor, base: torch.Tensor, prompt_ids: Sequence[int]
) -> tuple[Measures, list[str]]:
    """A model's measures, and in words what is wrong with its samples beside the base's.

    Both are `inspect`'s numbers of the same prompts and noise.
    """
    measures = Measures(
        mean_over_prompts(own[:, 0], prompt_ids),
        _diversity(own, prompt_ids),
        mean_over_prompts(_distance(own[:, 1:], base[:, 1:]), prompt_ids),
    )
    findings = []
    more = mean_over_prompts(own[:, 0] - base[:, 0], prompt_ids)
    if more.mean > math.log10(GRID_FACTOR) and more.excludes_zero:
        findings.append(
            f"grid artefacts: a periodic pattern stands {10**more.mean:.1f} times higher above its "
            "surroundings than in the base's pictures"
        )
    before, now = _diversity(base, prompt_ids), measures.diversity
    if before is None or now is None or before.mean == 0:
        return measures, findings
    if now.mean < DIVERSITY_SHARE * before.mean:
        findings.append(
            f"diversity lost: samples of a prompt differ {now.mean / before.mean:.0%} as much as "
            "the base's"
        )
    if measures.distance.mean > DISTANCE_SHARE * before.mean:
        findings.append(
            f"far from the base: samples have moved by {measures.distance.mean / before.mean:.1f} "
            "times what two of the base's samples of a prompt differ"
        )
    return measures, findings


def _diversity(numbers: torch.Tensor, prompt_ids: Sequence[int]) -> Interval | None:
    """The mean distance of two samples of a prompt, over prompts."""
    ids = torch.as_tensor(prompt_ids)
    distances, prompts = [], []
    for prompt in ids.unique().tolist():
        coarse = numbers[ids == prompt, 1:]
        for first in range(len(coarse) - 1):
            apart = _distance(coarse[first + 1 :], coarse[first])
            distances.append(apart)
            prompts += [prompt] * len(apart)
    return mean_over_prompts(torch.cat(distances), prompts) if distances else None


def _distance(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one - other).square().mean(dim=-1).sqrt()


def _hann(length: int) -> torch.Tensor:
    return torch.hann_window(length, periodic=False) + 1e-3
