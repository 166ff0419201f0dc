# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""JAGG: which steps form a window, when interpolation is exact, and what a router chooses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_leangrpo import platform
from megatron_leangrpo.diffusion.kernels import step_coefficients
from megatron_leangrpo.diffusion.selection import StepPlan, build_step_selector
from megatron_leangrpo.diffusion.sigmas import build_sigma_schedule
from megatron_leangrpo.grpo.schedules.jagg import agreement, consecutive_windows, interpolate
from megatron_leangrpo.grpo.trajectory import TrainedStep, Window
from tests.grpo import tiny
from tests.vectors import VECTORS, tensor


def _plan(*trained: int, drawn_singly: bool = False) -> StepPlan:
    return StepPlan(trained, trained, drawn_singly)


@pytest.mark.parametrize(
    ("plans", "size", "expected"),
    [
        ([_plan(0, 1, 2, 3, 4)], 2, [(0, 1), (2, 3), (4,)]),
        ([_plan(0, 1, 2, 3, 4)], 5, [(0, 1, 2, 3, 4)]),
        ([_plan(0, 1, 2)], 1, [(0,), (1,), (2,)]),
        ([_plan(1, 2, 3, 6, 7, 9)], 3, [(1, 2, 3), (6, 7), (9,)]),
        ([_plan(0, 1, 2), _plan(0, 1, 2)], 3, [(0, 1, 2)]),
        ([_plan(0, 1, 2), _plan(1, 2, 3)], 3, [(0,), (1, 2), (3,)]),
        ([_plan(0, 1), _plan(2, 3)], 4, [(0, 1), (2, 3)]),
        ([_plan(0, 1, 2, drawn_singly=True)], 3, [(0,), (1,), (2,)]),
        ([_plan()], 3, []),
    ],
)
def test_windows_are_consecutive_steps_that_the_same_trajectories_train(plans, size, expected):
    assert consecutive_windows(plans, size) == expected


def test_no_window_spans_two_transformers():
    plans = [_plan(0, 1, 2, 3, 4, 5)]
    assert consecutive_windows(plans, 4, boundary=2) == [(0, 1), (2, 3, 4, 5)]
    assert consecutive_windows(plans, 3, boundary=3) == [(0, 1, 2), (3, 4, 5)]
    schedule = build_sigma_schedule("static_shift", 5, shift=1.0)
    # Timesteps 1, 0.8, 0.6, 0.4 and 0.2.
    assert [schedule.first_below(at) for at in (0.7, 0.6, 0.0, None)] == [2, 3, 5, None]


def test_random_steps_form_no_window_and_random_blocks_do():
    single = build_step_selector("random_fraction", 16, timestep_fraction=0.6)
    blocks = build_step_selector("random_fraction", 16, timestep_fraction=0.6, block_size=3)
    for sample in range(20):
        plan = single.plan(0, 0, 0, sample)
        assert consecutive_windows([plan], 3) == [(step,) for step in plan.trained]
        plan = blocks.plan(0, 0, 0, sample)
        assert len(plan.trained) == blocks.num_trained() == 9
        assert [len(window) for window in consecutive_windows([plan], 3)] == [3, 3, 3]


@pytest.mark.parametrize("size", [0, 10])
def test_a_block_longer_than_the_share_is_refused(size):
    with pytest.raises(ValueError, match=f"sampling.block_size={size}: must be between 1 and 9"):
        build_step_selector("random_fraction", 16, block_size=size)


def _steps(sigmas: list[float], velocities: torch.Tensor) -> list[TrainedStep]:
    """Steps at given sigmas; the last sigma only ends the last step."""
    grid = torch.tensor([*sigmas, 0.0], dtype=torch.float64)
    zeros = torch.zeros(len(velocities[0]), dtype=torch.float64)
    return [
        TrainedStep(
            index=index,
            timestep=grid[index].expand(len(zeros)),
            coefficients=step_coefficients("dance_sde", 0.3, grid, index),
            x=zeros,
            x_next=zeros,
            old_log_prob=zeros,
            trained=torch.ones(len(zeros), dtype=torch.bool),
            velocity=velocity,
        )
        for index, velocity in enumerate(velocities)
    ]


FAMILY = VECTORS["jagg_affine_family"]


@pytest.mark.parametrize(("key", "curvature"), [("c2_0", 0.0), ("c2_1", 1.0)])
def test_interpolation_equals_the_reference_and_is_exact_for_an_affine_jacobian(key, curvature):
    times, expected = FAMILY["t"], FAMILY[key]
    p, q, r = (tensor(FAMILY[name]) for name in ("P", "Q", "R2"))
    cotangents = [tensor(g)[None] for g in FAMILY["g"]]
    window = Window(_steps(times, torch.zeros(4, 1, 3, dtype=torch.float64)))
    ends = interpolate(window, cotangents)
    jacobians = [p + t * q + curvature * t**2 * r for t in (times[0], times[-1])]
    gradient = sum(u[0] @ jacobian for u, jacobian in zip(ends, jacobians))
    assert tiny.relative_l2(gradient, tensor(expected["jagg"])) < 1e-12
    error = tiny.relative_l2(gradient, tensor(expected["exact"]))
    assert error < 1e-12 if curvature == 0 else error == pytest.approx(expected["rel_err"], 1e-6)


def test_interpolation_is_exact_for_a_linear_velocity_with_the_latents_on_the_chord():
    """v = W z + sigma b + c: its Jacobian is affine in (z, sigma), so affine along the chord."""
    sigmas = torch.tensor([0.9, 0.75, 0.6, 0.2], dtype=torch.float64)
    first, last, *cotangents = torch.randn(6, 2, 5, dtype=torch.float64)
    window = Window(_steps(sigmas.tolist(), torch.zeros(4, 2, 5, dtype=torch.float64)))
    position = (sigmas[0] - sigmas) / (sigmas[0] - sigmas[-1])
    latents = [torch.lerp(first, last, k) for k in position]

    def gradient(indices: list[int], outer: list[torch.Tensor]) -> list[torch.Tensor]:
        W, b, c = (torch.zeros(size, dtype=torch.float64) for size in ((5, 5), 5, 5))
        for tensor_ in (W, b, c):
            tensor_.requires_grad_()
        velocities = [latents[k] @ W.T + sigmas[k] * b + c for k in indices]
        return list(torch.autograd.grad(velocities, (W, b, c), outer))

    exact = gradient([0, 1, 2, 3], cotangents)
    for found, expected in zip(gradient([0, 3], interpolate(window, cotangents)), exact):
        assert tiny.relative_l2(found, expected) < 1e-12


@pytest.mark.parametrize("length", [1, 2])
def test_one_and_two_steps_keep_their_cotangents(length):
    cotangents = list(torch.randn(length, 2, 3, dtype=torch.float64))
    window = Window(_steps([0.9, 0.4][:length], torch.zeros(length, 2, 3, dtype=torch.float64)))
    for kept, given in zip(interpolate(window, cotangents), cotangents, strict=True):
        assert torch.equal(kept, given)


def test_agreement_is_one_on_a_line_and_less_off_it():
    sigmas = [0.9, 0.7, 0.6, 0.2]
    start, slope, other = torch.randn(3, 2, 5, dtype=torch.float64)
    line = [start + sigma * slope for sigma in sigmas]
    assert torch.allclose(agreement(_steps(sigmas, line)), torch.ones(2).double())
    bent = [v + (other if k == 2 else 0) for k, v in enumerate(line)]
    assert (agreement(_steps(sigmas, bent)) < 0.999).all()


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> str:
    return tiny.write_prompts(tmp_path_factory.mktemp("prompts"))


def _config(prompts: str, **sections: Any):
    """Six trained steps, float64; `jagg_frac` 1 so that every scored window is approximated."""
    defaults = {
        "model": {"dtype": "float64"},
        "sampling": {"num_steps": 7, "kernel": "dance_sde", "noise_level": 0.3},
        "grpo": {
            "group_size": 2,
            "micro_batch_size": 1,
            "jagg_window": 3,
            "jagg_frac": 1.0,
        },
    }
    merged = {n: {**defaults.get(n, {}), **sections.get(n, {})} for n in defaults | sections}
    return tiny.tiny_config(prompts, **merged)


def _second_gradient(experiment, schedule: str) -> tuple[tiny.Tensors, dict[str, float]]:
    """The gradient of the first iteration when it is run again: now jagg has scores."""
    runner = experiment.runner(schedule)
    batch = experiment.sampler.batch(0)
    runner.run(0, batch)
    metrics = runner.run(0, batch).metrics
    return experiment.architecture.export_gradients(experiment.model), metrics


def test_the_first_iteration_is_exact_and_says_so(prompts):
    experiment = tiny.start(_config(prompts))
    exact, _ = tiny.first_gradient(experiment, "replay")
    gradient, metrics = tiny.first_gradient(experiment, "jagg")
    platform.destroy_distributed()
    assert tiny.worst(gradient, exact)[0] == 0.0
    assert metrics["jagg_share"] == 0.0
    assert metrics["jagg_score"] > 0.9
    assert set(metrics) >= {"jagg_score/0-2", "jagg_score/3-5"}


@pytest.mark.parametrize("base", ["replay", "retain", "reweight"])
@pytest.mark.parametrize("window", [1, 2])
def test_windows_of_one_and_two_steps_are_exact(prompts, base, window):
    experiment = tiny.start(_config(prompts, grpo={"jagg_window": window, "jagg_on": base}))
    exact, _ = tiny.first_gradient(experiment, "replay")
    gradient, _ = _second_gradient(experiment, "jagg")
    platform.destroy_distributed()
    # Reweight weighs sums in float64.
    assert tiny.worst(gradient, exact)[0] <= 1e-12


CASES: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {},
    "both trajectories of a group on a rank": {"grpo": {"placement": "local"}},
    "KL": {"grpo": {"kl_beta": 0.5, "kl_form": "velocity_mse"}},
    "clipped advantages": {"grpo": {"adv_clip": 0.5}},
    "std of all groups, a last short window": {
        "sampling": {"num_steps": 6},
        "grpo": {"advantage": "flow_grpo_global_std", "jagg_window": 4},
    },
    "random blocks for each sample, recomputation": {
        "model": {"recompute_granularity": "full"},
        "sampling": {
            "step_selection": "random_fraction",
            "timestep_fraction": 0.6,
            "block_size": 3,
        },
    },
    "two updates, the first of them": {"grpo": {"updates_per_rollout": 2}},
}


def _agreements(
    prompts: str, tensor_parallel: int, cases: list[str], overlap: bool = False
) -> dict[str, dict[str, float]]:
    """By case: how far jagg on retain and on reweight are from jagg on replay."""
    results = {}
    for case in cases:
        layout = {"tensor_model_parallel_size": tensor_parallel}
        sections = {"parallel": layout, "optimizer": {"overlap_grad_reduce": overlap}}
        experiment = tiny.start(_config(prompts, **sections, **CASES[case]))
        if experiment.reference is not None:
            tiny.move_away_from_reference(experiment)
        gradients, shares = {}, []
        for base in ("replay", "retain", "reweight"):
            tiny.change_grpo(experiment, jagg_on=base)
            gradients[base], metrics = _second_gradient(experiment, "jagg")
            shares.append(metrics["jagg_share"])
            assert metrics["ratio_min"] == metrics["ratio_max"] == 1.0
        exact, _ = tiny.first_gradient(experiment, "replay")
        results[case] = {
            "retain": tiny.worst(gradients["retain"], gradients["replay"])[0],
            "reweight": tiny.worst(gradients["reweight"], gradients["replay"])[0],
            "approximation": tiny.worst(gradients["replay"], exact)[0],
            "least share": min(shares),
        }
    return results


def _check(results: dict[str, dict[str, float]]) -> None:
    for case, result in results.items():
        assert result["retain"] <= 1e-12, (case, result)
        assert result["reweight"] <= 1e-12, (case, result)
        # It would prove nothing if no window were approximated.
        assert result["least share"] > 0.4 and result["approximation"] > 1e-6, (case, result)


def test_in_one_process_jagg_gives_one_gradient_on_every_schedule(prompts):
    results = _agreements(prompts, 1, list(CASES))
    platform.destroy_distributed()
    _check(results)


@pytest.mark.parametrize(("tensor_parallel", "overlap"), [(1, True), (1, False), (2, False)])
def test_on_two_ranks_jagg_gives_one_gradient_on_every_schedule(
    run_ranks, prompts, tensor_parallel, overlap
):
    """The number of backwards changes between updates, whichever way megatron reduces."""
    cases = ["plain", "both trajectories of a group on a rank"]
    for results in run_ranks(2, _agreements, prompts, tensor_parallel, cases, overlap):
        _check(results)


@pytest.mark.parametrize("base", ["replay", "retain", "reweight"])
def test_the_backwards_of_a_window_become_two(prompts, base):
    experiment = tiny.start(_config(prompts, grpo={"jagg_on": base}))
    weight = experiment.policy.model.final_layer.linear
    passes: list[int] = []
    weight.register_full_backward_hook(lambda *_: passes.append(1))
    runner, batch = experiment.runner("jagg"), experiment.sampler.batch(0)
    counts = []
    for _ in range(2):
        passes.clear()
        runner.run(0, batch)
        counts.append(len(passes))
    platform.destroy_distributed()
    # 4 trajectories of 6 trained steps: first exact, then two windows of three.
    assert counts == [4 * 6, 4 * 2 * 2]


def test_only_the_best_share_of_the_windows_is_approximated(prompts):
    experiment = tiny.start(_config(prompts, grpo={"jagg_frac": 0.5}))
    _, metrics = _second_gradient(experiment, "jagg")
    runner = experiment.runner("jagg")
    runner.run(0, experiment.sampler.batch(0))
    scores, approximated = runner.router.scores, runner.router.approximated
    platform.destroy_distributed()
    assert metrics["jagg_share"] == 0.5
    assert set(scores) == {(0, 3), (3, 3)}
    assert approximated == {max(scores, key=scores.get)}


def test_the_measured_cosine_is_that_of_the_gradients(prompts):
    experiment = tiny.start(_config(prompts, grpo={"jagg_check_interval": 1}))
    exact, _ = tiny.first_gradient(experiment, "replay")
    gradient, metrics = _second_gradient(experiment, "jagg")
    whole = [torch.cat([g[name].flatten() for name in exact]) for g in (gradient, exact)]
    cosine = torch.nn.functional.cosine_similarity(*whole, dim=0).item()
    platform.destroy_distributed()
    assert metrics["jagg_gradient_cosine"] == pytest.approx(cosine, abs=1e-12)
    assert metrics["jagg_gradient_error"] == pytest.approx(tiny.relative_l2(*whole), rel=1e-6)


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_the_measured_cosine_is_the_same_in_every_layout(run_ranks, prompts, tensor_parallel):
    sections = {"grpo": {"jagg_check_interval": 1, "jagg_on": "reweight"}}
    alone = _cosine(prompts, 1, sections)
    platform.destroy_distributed()
    for cosine in run_ranks(2, _cosine, prompts, tensor_parallel, sections):
        assert cosine == pytest.approx(alone, abs=1e-10)


def _cosine(prompts: str, tensor_parallel: int, sections: dict[str, Any]) -> float:
    layout = {"parallel": {"tensor_model_parallel_size": tensor_parallel}}
    experiment = tiny.start(_config(prompts, **layout, **sections))
    return _second_gradient(experiment, "jagg")[1]["jagg_gradient_cosine"]
