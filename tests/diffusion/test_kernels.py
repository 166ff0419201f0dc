# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Stochastic steps, log-probs and their gradients against the reference numbers and autograd."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_leangrpo.diffusion.guidance import guided_velocity
from megatron_leangrpo.diffusion.kernels import (
    check_kernel,
    draw_step,
    log_prob,
    log_prob_of_mean,
    log_prob_velocity_gradient,
    on_policy_velocity_gradient,
    predicted_x0,
    step_coefficients,
    transition_mean,
)
from megatron_leangrpo.diffusion.sigmas import build_sigma_schedule
from tests.vectors import STEPS, VECTORS, coefficients_of, schedule_of, tensor

SCORED = [name for name, case in STEPS.items() if case.get("logp_mean") is not None]
LEVELS = {"flow_sde": 0.8, "dance_sde": 0.3, "wan_sde": None, "cps": 0.7, "ode": None}


def close(actual, expected):
    torch.testing.assert_close(actual, tensor(expected), rtol=1e-10, atol=1e-13)


def inputs(case, dtype=torch.float64):
    return tuple(tensor(case[name], dtype) for name in ("x", "v", "eps"))


def test_every_reference_step_is_covered():
    assert len(STEPS) == len(VECTORS["steps"]) == 27
    assert len(SCORED) == 25
    assert {tensor(case["x"]).dim() for case in STEPS.values()} == {3, 5}


@pytest.mark.parametrize("name", STEPS)
def test_coefficients_and_step_equal_the_reference(name):
    case, c = STEPS[name], coefficients_of(STEPS[name])
    for ours, theirs in (
        ("sigma", "sigma"),
        ("sigma_next", "sigma_next"),
        ("dt", "dt"),
        ("coef_x", "coef_x"),
        ("coef_v", "coef_v"),
        ("std", "std"),
        ("amplitude", "s"),
    ):
        close(getattr(c, ours), [case[theirs]])
    x, v, eps = inputs(case)
    close(predicted_x0(x, v, c), case["x0_pred"])
    transition = draw_step(x, v, eps, c)
    close(transition.mean, case["mean"])
    close(transition.x_next, case["x_next"])
    if name not in SCORED:
        assert transition.log_prob.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", SCORED)
def test_log_prob_equals_the_reference(name):
    case, c = STEPS[name], coefficients_of(STEPS[name])
    x, v, _ = inputs(case)
    x_next, v_new = tensor(case["x_next"]), tensor(case["v_new"])
    old = log_prob(x, v, x_next, c)
    close(old, case["logp_mean"])
    close(old * x[0].numel(), case["logp_sum"])
    close(transition_mean(x, v_new, c), case["mean_new"])
    new = log_prob(x, v_new, x_next, c)
    close(new, case["logp_mean_new"])
    close((new - old).exp(), case["ratio"])
    rounded = log_prob(x, v, tensor(case["x_next_bf16"]), c)
    close(rounded, case["logp_mean_of_bf16_x_next"])
    if "logp_true_gaussian_mean" in case:
        gaussian = log_prob(x, v, x_next, replace(c, gaussian_log_prob=True))
        close(gaussian, case["logp_true_gaussian_mean"])
    else:
        normaliser = math.log(case["std"]) + 0.5 * math.log(2 * math.pi)
        close(old + normaliser, case["logp_mean_without_normaliser"])


@pytest.mark.parametrize("name", SCORED)
def test_velocity_gradient_equals_the_reference_and_autograd(name):
    case, c = STEPS[name], coefficients_of(STEPS[name])
    x, v, eps = inputs(case)
    x_next = tensor(case["x_next"])
    close(log_prob_velocity_gradient(x, v, x_next, c), case["dlogp_mean_dv"])
    v.requires_grad_()
    log_prob(x, v, x_next, c).sum().backward()
    close(v.grad, case["dlogp_mean_dv"])
    close(on_policy_velocity_gradient(eps, c), case["dlogp_mean_dv"])


def test_on_policy_form_deviates_no_more_than_the_reference_says():
    worst = 0.0
    for name in SCORED:
        case, c = STEPS[name], coefficients_of(STEPS[name])
        x, v, eps = inputs(case)
        general = log_prob_velocity_gradient(x, v, tensor(case["x_next"]), c)
        worst = max(worst, (on_policy_velocity_gradient(eps, c) - general).abs().max().item())
    reference = VECTORS["on_policy_closed_form"]["max_abs_error_over_all_step_cases"]
    # another order of the same roundings
    assert worst < 4 * reference


@pytest.mark.parametrize("name", STEPS)
def test_float32_step_is_within_the_published_budget(name):
    case, c = STEPS[name], coefficients_of(STEPS[name])
    x, v, eps = inputs(case, torch.float32)
    transition = draw_step(x, v, eps, c)
    assert transition.x_next.dtype == transition.log_prob.dtype == torch.float32
    torch.testing.assert_close(transition.mean, tensor(case["mean"]).float(), rtol=0, atol=2e-6)
    if name in SCORED:
        # 5e-6 is the reference file's bound for float32 kernels.
        scored = log_prob(x, v, tensor(case["x_next"]).float(), c)
        expected = tensor(case["logp_mean"]).float()
        torch.testing.assert_close(scored, expected, rtol=0, atol=5e-6)
        gradient = log_prob_velocity_gradient(x, v, tensor(case["x_next"]).float(), c)
        expected = tensor(case["dlogp_mean_dv"]).float()
        torch.testing.assert_close(gradient, expected, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("name", VECTORS["sigma_one_guard"]["cases"])
def test_flow_sde_is_bounded_near_sigma_one(name):
    guard = VECTORS["sigma_one_guard"]
    case, level = guard["cases"][name], guard["level"]
    sigma, second = case["sigma0"], case["sigma1"]
    amplitude = step_coefficients("flow_sde", level, tensor([sigma, second, 0.0]), 0).amplitude
    close(amplitude, [case["s_min_guard"]])
    literal = level * math.sqrt(sigma / (1 - (second if sigma == 1 else sigma)))
    assert literal == pytest.approx(case["s_literal_equality_guard"], rel=1e-9)
    if sigma == 1:
        close(amplitude, [literal])


def test_flow_sde_first_std_is_the_level_where_sigma_is_one():
    for steps in (1, 6, 28):
        sigmas = build_sigma_schedule("flux_dynamic", steps, image_tokens=1024).sigmas
        close(step_coefficients("flow_sde", 0.9, sigmas, 0).std, [0.9])


def test_dance_score_form_is_the_unified_step():
    case = VECTORS["identity_dance_score_form_equals_unified_form"]
    x, v = tensor(case["x"]), tensor(case["v"])
    sigma, eta = case["sigma"], case["eta"]
    c = step_coefficients("dance_sde", eta, tensor([sigma, case["sigma_next"]]), 0)
    close(transition_mean(x, v, c), case["mean"])
    dt = case["sigma_next"] - sigma
    score = -(x - (1 - sigma) * (x - sigma * v)) / sigma**2
    by_score = x + v * dt - 0.5 * eta**2 * score * dt
    torch.testing.assert_close(transition_mean(x, v, c), by_score, rtol=0, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", [(4, 3), (2, 2, 3, 2)])
@pytest.mark.parametrize("kernel", LEVELS)
def test_a_batch_may_mix_steps_and_deterministic_samples(kernel, shape, dtype):
    sigmas = build_sigma_schedule("static_shift", 6, shift=3.0).sigmas
    steps, stochastic = [0, 4, 2, 5, 1], [True, True, False, True, False]
    torch.manual_seed(0)
    x, v, noise = (torch.randn(5, *shape, dtype=dtype) for _ in range(3))
    c = step_coefficients(kernel, LEVELS[kernel], sigmas, steps, stochastic)
    batch = draw_step(x, v, noise, c)
    gradient = log_prob_velocity_gradient(x, v, batch.x_next, c)
    for i, (step, is_stochastic) in enumerate(zip(steps, stochastic)):
        name, level = (kernel, LEVELS[kernel]) if is_stochastic else ("ode", None)
        alone = step_coefficients(name, level, sigmas, step)
        alone = replace(alone, gaussian_log_prob=kernel != "cps")
        single = draw_step(x[i : i + 1], v[i : i + 1], noise[i : i + 1], alone)
        assert torch.equal(batch.x_next[i : i + 1], single.x_next)
        torch.testing.assert_close(batch.log_prob[i : i + 1], single.log_prob)
        one = log_prob_velocity_gradient(x[i : i + 1], v[i : i + 1], single.x_next, alone)
        torch.testing.assert_close(gradient[i : i + 1], one)


@pytest.mark.parametrize("kernel", LEVELS)
def test_deterministic_samples_have_zero_log_prob_and_zero_gradient(kernel):
    sigmas = build_sigma_schedule("static_shift", 4, shift=3.0).sigmas
    c = step_coefficients(kernel, LEVELS[kernel], sigmas, [3, 1], [False, False])
    x, v, noise = (torch.randn(2, 3, 4) for _ in range(3))
    v.requires_grad_()
    transition = draw_step(x, v, noise, c)
    torch.testing.assert_close(transition.x_next, (x + v * c.dt.float().view(2, 1, 1)).detach())
    # scored away from the mean, as a replay after an update does
    value = log_prob(x, v, transition.x_next + 1, c)
    assert value.tolist() == [0.0, 0.0]
    value.sum().backward()
    assert torch.equal(v.grad, torch.zeros_like(v))
    assert torch.equal(on_policy_velocity_gradient(noise, c), torch.zeros_like(v))
    assert torch.equal(
        log_prob_velocity_gradient(x, v, transition.x_next + 1, c), torch.zeros_like(v)
    )


def test_cps_last_step_is_deterministic_and_keeps_the_predicted_clean_latent():
    sigmas = build_sigma_schedule("flux_dynamic", 6, image_tokens=1024).sigmas
    c = step_coefficients("cps", 0.8, sigmas, 5)
    x, v, noise = (torch.randn(2, 3, 4, dtype=torch.float64) for _ in range(3))
    transition = draw_step(x, v, noise, c)
    torch.testing.assert_close(transition.x_next, predicted_x0(x, v, c), rtol=0, atol=1e-14)
    assert transition.log_prob.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("velocity_dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kernel", ["flow_sde", "dance_sde", "wan_sde", "cps"])
def test_scoring_a_stored_step_again_gives_the_same_bits(kernel, velocity_dtype):
    sigmas = build_sigma_schedule("static_shift", 8, shift=3.0).sigmas
    c = step_coefficients(kernel, LEVELS[kernel], sigmas, [1, 3, 6])
    latent_dtype = torch.promote_types(velocity_dtype, torch.float32)
    x, noise = (torch.randn(3, 64, 16, dtype=latent_dtype) for _ in range(2))
    v = torch.randn(3, 64, 16, dtype=velocity_dtype)
    transition = draw_step(x, v, noise, c)
    again = log_prob(x, v.clone().requires_grad_(), transition.x_next, c)
    assert transition.log_prob.dtype == latent_dtype
    assert torch.equal((again - transition.log_prob).exp(), torch.ones_like(again))


def test_rounded_storage_is_scored_as_stored():
    c = coefficients_of(STEPS["dance_sde_flux_shift3_N16_eta0.3_k0"])
    x, v, noise = (torch.randn(2, 64, 16, dtype=torch.bfloat16) for _ in range(3))
    transition = draw_step(x, v, noise, c)
    assert transition.x_next.dtype == torch.bfloat16
    assert transition.log_prob.dtype == torch.float32
    assert torch.equal(log_prob(x, v, transition.x_next, c), transition.log_prob)


@given(
    kernel=st.sampled_from(["flow_sde", "dance_sde", "wan_sde", "cps"]),
    level=st.floats(0.05, 1.0),
    num_steps=st.integers(2, 30),
    where=st.floats(0, 1, exclude_max=True),
    shift=st.floats(1.0, 7.0),
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_closed_forms_hold_for_any_step(kernel, level, num_steps, where, shift, shape, seed):
    level = None if kernel == "wan_sde" else level
    sigmas = build_sigma_schedule("static_shift", num_steps, shift=shift).sigmas
    step = int(where * (num_steps - 1))  # not the last, where CPS has no log-prob
    c = step_coefficients(kernel, level, sigmas, step)
    rng = torch.Generator().manual_seed(seed)
    x, v, noise = (torch.randn(2, *shape, generator=rng, dtype=torch.float64) for _ in range(3))
    v.requires_grad_()
    x_next = draw_step(x, v, noise, c).x_next
    log_prob(x, v, x_next, c).sum().backward()
    scale = v.grad.abs().max().item() + 1e-12
    for closed in (
        log_prob_velocity_gradient(x, v.detach(), x_next, c),
        on_policy_velocity_gradient(noise, c),
    ):
        # x_next - mean loses up to 1 / std of the digits of x_next
        torch.testing.assert_close(closed, v.grad, rtol=1e-9, atol=1e-11 * scale / c.std.item())


@pytest.mark.parametrize("kernel", ["flow_sde", "dance_sde", "wan_sde", "cps"])
def test_a_step_keeps_the_marginal_of_the_flow(kernel):
    """On exact data the step's result has the variance that the next sigma prescribes."""
    sigmas = build_sigma_schedule("static_shift", 64, shift=3.0).sigmas
    c = step_coefficients(kernel, LEVELS[kernel], sigmas, 30)
    # x = (1 - sigma) * data + sigma * noise with data = 0: the exact velocity is x / sigma
    variance_of_mean = (c.coef_x + c.coef_v / c.sigma) ** 2 * c.sigma**2
    total = variance_of_mean + c.std**2
    # Euler-Maruyama is first order in dt; CPS keeps the coefficients exactly
    tolerance = 1e-12 if kernel == "cps" else 2 * c.dt.abs().item()
    torch.testing.assert_close(total, c.sigma_next**2, rtol=tolerance, atol=0)


def test_guided_velocity_sends_gradient_to_both_branches():
    case = VECTORS["cfg"]
    step = STEPS[case["step_case"]]
    c, x = coefficients_of(step), tensor(step["x"])
    weight = case["guidance"]
    for detach in (False, True):
        cond = tensor(case["v_cond"]).requires_grad_()
        uncond = tensor(case["v_uncond"]).requires_grad_()
        v = guided_velocity(cond, uncond, weight, detach_unconditional=detach)
        close(v.detach(), case["v"])
        close(transition_mean(x, v, c).detach(), case["mean"])
        value = log_prob(x, v, tensor(case["x_next"]), c)
        close(value.detach(), case["logp_mean"])
        value.sum().backward()
        close(cond.grad, case["dlogp_dv_cond"])
        if detach:
            assert uncond.grad is None
        else:
            close(uncond.grad, case["dlogp_dv_uncond"])


def test_schedules_of_the_step_cases_contain_their_sigmas():
    for case in STEPS.values():
        sigmas = schedule_of(case).sigmas
        close(sigmas[case["step_index"]], case["sigma"])
        close(sigmas[1], case["sigma_index1"])


def test_coefficients_move_between_devices_unchanged():
    sigmas = build_sigma_schedule("static_shift", 4, shift=3.0).sigmas
    c = step_coefficients("cps", 0.5, sigmas, [0, 1, 2], [True, False, True])
    moved = c.to("cpu")
    assert moved.gaussian_log_prob is False
    for name in ("sigma", "sigma_next", "dt", "coef_x", "coef_v", "std", "amplitude"):
        assert torch.equal(getattr(moved, name), getattr(c, name))


def test_log_prob_does_not_differentiate_the_stored_latent():
    c = coefficients_of(STEPS["flow_sde_flux_N6_lvl0.9_k2"])
    mean = torch.zeros(2, 3, requires_grad=True)
    x_next = torch.ones(2, 3, requires_grad=True)
    log_prob_of_mean(mean, x_next, c).sum().backward()
    assert x_next.grad is None
    assert mean.grad is not None


@pytest.mark.parametrize(
    ("kernel", "level", "setting"),
    [
        ("euler", 0.7, "sampling.kernel"),
        ("flow_sde", None, "sampling.noise_level"),
        ("flow_sde", 0.0, "sampling.noise_level"),
        ("dance_sde", -0.3, "sampling.noise_level"),
        ("dance_sde", float("inf"), "sampling.noise_level"),
        ("cps", 1.2, "sampling.noise_level"),
        ("wan_sde", 0.7, "sampling.noise_level"),
        ("ode", 0.7, "sampling.noise_level"),
    ],
)
def test_bad_kernel_settings_are_named(kernel, level, setting):
    with pytest.raises(ValueError, match=setting):
        check_kernel(kernel, level)
