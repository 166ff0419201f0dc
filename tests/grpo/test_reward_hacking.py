# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Artefacts, lost diversity and drift are found on pictures made to have them, and on no others."""

from __future__ import annotations

import pytest
import torch

from megatron_leangrpo.grpo.reward_hacking import inspect, measure, peak_over_surroundings

PROMPTS, SAMPLES = 4, 3
IDS = [prompt for _ in range(SAMPLES) for prompt in range(PROMPTS)]


def natural(count: int, size: int, seed: int) -> torch.Tensor:
    """Random pictures with the spectrum of natural ones, amplitude 1 / frequency."""
    generator = torch.Generator().manual_seed(seed)
    frequency = torch.fft.fftfreq(size)
    radius = (frequency[:, None].square() + frequency.square()).sqrt().clamp(min=1 / size)
    noise = torch.fft.fft2(torch.randn(count, 3, size, size, generator=generator))
    pictures = torch.fft.ifft2(noise / radius).real
    low, high = pictures.amin((2, 3), keepdim=True), pictures.amax((2, 3), keepdim=True)
    return (pictures - low) / (high - low)


def grid(size: int, period: int) -> torch.Tensor:
    """Lines of one pixel, as a latent's cells leave them."""
    lines = torch.zeros(size, size)
    lines[::period] = lines[:, ::period] = 1
    return lines


@pytest.mark.parametrize("size", [256, 360])
@pytest.mark.parametrize("period", [8, 16])
def test_a_grid_too_faint_to_see_stands_out_of_the_spectrum(size, period):
    plain = natural(4, size, seed=0)
    # Five grey levels of 255.
    faint = plain + 0.02 * grid(size, period)
    assert peak_over_surroundings(plain).max() < 1.6
    assert (peak_over_surroundings(faint) - peak_over_surroundings(plain)).min() > 0.4


def test_noise_and_empty_pictures_have_no_grid():
    plain = natural(4, 128, seed=1)
    noisy = plain + 0.02 * torch.randn(plain.shape, generator=torch.Generator().manual_seed(2))
    change = peak_over_surroundings(noisy) - peak_over_surroundings(plain)
    assert change.mean().abs() < 0.2
    assert peak_over_surroundings(torch.full((1, 3, 64, 64), 0.5)).abs().max() < 1e-3


def findings_of(own: torch.Tensor, base: torch.Tensor) -> list[str]:
    return measure(inspect(own), inspect(base), IDS)[1]


@pytest.fixture(scope="module")
def base() -> torch.Tensor:
    return natural(PROMPTS * SAMPLES, 128, seed=3)


def test_the_base_itself_and_small_changes_are_fine(base):
    assert findings_of(base, base) == []
    brighter = (base * 1.05).clamp(max=1)
    assert findings_of(brighter, base) == []


def test_each_sign_is_named_in_words(base):
    [artefacts] = findings_of(base + 0.04 * grid(128, 16), base)
    assert artefacts.startswith("grid artefacts: a periodic pattern stands ")
    # The samples of a prompt come together, around where they were.
    groups = base.unflatten(0, (SAMPLES, PROMPTS))
    alike = (0.3 * groups + 0.7 * groups.mean(dim=0)).flatten(0, 1)
    [lost] = findings_of(alike, base)
    assert lost == "diversity lost: samples of a prompt differ 30% as much as the base's"
    [far] = findings_of(base.flip(0) * 0.9 + 0.3, base)
    assert far.startswith("far from the base: samples have moved by 1.")


def test_one_sample_a_prompt_has_no_diversity_and_videos_are_judged_by_their_frames(base):
    ids = list(range(len(base)))
    measures, findings = measure(inspect(base), inspect(base), ids)
    assert measures.diversity is None and findings == []
    video = base[:, None].expand(-1, 5, -1, -1, -1)
    torch.testing.assert_close(inspect(video), inspect(base))
