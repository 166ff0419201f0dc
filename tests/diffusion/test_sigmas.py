# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Sigma schedules against the reference numbers and against diffusers' own schedulers."""

import numpy as np
import pytest
import torch

from megatron_leangrpo.diffusion.sigmas import build_sigma_schedule, flux_mu
from tests.vectors import VECTORS, tensor

CASES = VECTORS["schedules"]


def build(name: str, case: dict, **options):
    num_steps = len(case["sigmas"]) - 1
    if name.startswith("flux_dynamic"):
        return build_sigma_schedule("flux_dynamic", num_steps, image_tokens=case["seq_len"])
    kind = "static_shift" if name.startswith("static_shift") else "unipc_flow"
    return build_sigma_schedule(kind, num_steps, shift=case["shift"], **options)


def test_every_reference_schedule_is_covered():
    kinds = [name.rsplit("_N", 1)[0].rstrip("357").removesuffix("_shift") for name in CASES]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        "flux_dynamic": 5,
        "static": 6,
        "unipc_flow": 5,
    }


@pytest.mark.parametrize("name", CASES)
def test_sigmas_equal_the_reference(name):
    schedule = build(name, CASES[name])
    assert schedule.sigmas.dtype == schedule.timesteps.dtype == torch.float64
    torch.testing.assert_close(schedule.sigmas, tensor(CASES[name]["sigmas"]), rtol=1e-12, atol=0)
    assert schedule.num_steps == len(CASES[name]["sigmas"]) - 1
    if "mu" in CASES[name]:
        assert flux_mu(CASES[name]["seq_len"]) == pytest.approx(CASES[name]["mu"], rel=1e-12)


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("flux")])
def test_truncated_timesteps_are_the_published_integers(name):
    case = CASES[name]
    integers = case.get("timesteps_int", case.get("model_timestep_trunc_float32"))
    schedule = build(name, case, truncate_timesteps=True)
    assert (schedule.timesteps * 1000).tolist() == pytest.approx(integers, abs=1e-9)
    # The step itself uses the untruncated sigma.
    assert torch.equal(schedule.sigmas, build(name, case).sigmas)


def test_float64_truncation_would_differ_where_the_reference_says():
    for name, case in CASES.items():
        if "trunc_differs_at" in case:
            schedule = build(name, case, truncate_timesteps=True)
            ours = (schedule.timesteps * 1000).round().long().tolist()
            pairs = zip(ours, case["model_timestep_trunc_float64"])
            differs = [step for step, (a, b) in enumerate(pairs) if a != b]
            assert differs == case["trunc_differs_at"]


def test_untruncated_timesteps_are_the_sigmas():
    schedule = build_sigma_schedule("flux_dynamic", 8, image_tokens=256)
    assert torch.equal(schedule.timesteps, schedule.sigmas[:-1])


@pytest.mark.parametrize(("tokens", "steps"), [(64, 8), (1024, 6), (2025, 16), (4096, 28)])
def test_flux_schedule_is_what_diffusers_sampler_steps_through(tokens, steps):
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=flux_mu(tokens))
    ours = build_sigma_schedule("flux_dynamic", steps, image_tokens=tokens)
    # diffusers keeps float32 sigmas
    torch.testing.assert_close(scheduler.sigmas, ours.sigmas.float(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["flux_dynamic", "static_shift", "unipc_flow"])
@pytest.mark.parametrize("steps", [1, 2, 3, 101])
def test_any_number_of_steps_decreases_to_zero(name, steps):
    options = {"image_tokens": 2025} if name == "flux_dynamic" else {"shift": 3.0}
    schedule = build_sigma_schedule(name, steps, **options)
    assert schedule.sigmas.shape == (steps + 1,)
    assert (schedule.sigmas.diff() < 0).all()
    assert schedule.sigmas[-1] == 0
    assert schedule.sigmas.isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        (("karras", 8), "sampling.sigma_schedule"),
        (("static_shift", 0, None, 3.0), "sampling.num_steps"),
        (("static_shift", 8), "sampling.shift"),
        (("unipc_flow", 8, None, -1.0), "sampling.shift"),
        (("static_shift", 8, None, float("nan")), "sampling.shift"),
        (("flux_dynamic", 8, 1024, 3.0), "sampling.shift"),
    ],
)
def test_bad_settings_are_named(arguments, setting):
    with pytest.raises(ValueError, match=setting):
        build_sigma_schedule(*arguments)
