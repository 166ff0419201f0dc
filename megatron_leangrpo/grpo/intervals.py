# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Means over prompts and how sure they are.

Samples of one prompt are alike, so the mean of each prompt counts once: the interval is Student's t
over prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % confidence interval, which one prompt alone does not give."""

    mean: float
    half_width: float | None
    prompts: int

    @property
    def excludes_zero(self) -> bool:
        """Whether the mean is surely not 0."""
        return self.half_width is not None and abs(self.mean) > self.half_width

    def to_json(self) -> dict[str, float | int | None]:
        """With null for what is not known."""
        mean = self.mean if math.isfinite(self.mean) else None
        return {"mean": mean, "half_width": self.half_width, "prompts": self.prompts}

    def __str__(self) -> str:
        if self.half_width is None:
            return f"{self.mean:.4g}"
        digits = max(0, 1 - math.floor(math.log10(self.half_width))) if self.half_width else 4
        return f"{self.mean:.{digits}f} ± {self.half_width:.{digits}f}"


def mean_over_prompts(values: torch.Tensor, prompt_ids: Sequence[int]) -> Interval:
    """The mean of values `[samples]` by prompt and over prompts; NaNs are left out."""
    values = values.double()
    known = values.isfinite()
    _, prompts = torch.unique(torch.as_tensor(prompt_ids), return_inverse=True)
    prompts = prompts[known]
    counts = torch.bincount(prompts)
    means = torch.bincount(prompts, weights=values[known])[counts > 0] / counts[counts > 0]
    count = len(means)
    if count < 2:
        return Interval(float(means[0]) if count else math.nan, None, count)
    half_width = t_quantile(count - 1) * float(means.std()) / math.sqrt(count)
    # Squares of enormous scores overflow.
    known_width = half_width if math.isfinite(half_width) else None
    return Interval(float(means.mean()), known_width, count)


def t_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """Student's t beyond which 1 - confidence lies on both sides together.

    Exact for 1 and 2 degrees of freedom; else Cornish and Fisher's expansion, within 0.2 %.
    """
    p = (1 + confidence) / 2
    if freedom == 1:
        return math.tan(math.pi * (p - 0.5))
    if freedom == 2:
        return (2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p)))
    z, n = NormalDist().inv_cdf(p), freedom
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * n**4)
    )
