# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The clipped objective, ratio normalisation and KL terms against the reference numbers."""

from dataclasses import dataclass, replace

import pytest
import torch

from megatron_leangrpo.diffusion.kernels import (
    StepCoefficients,
    draw_step,
    log_prob,
    on_policy_velocity_gradient,
    step_coefficients,
    transition_mean,
)
from megatron_leangrpo.diffusion.sigmas import build_sigma_schedule
from megatron_leangrpo.grpo.objective import (
    KL_FORMS,
    Objective,
    clipped_policy_loss,
    normalised_log_ratio,
    reference_kl,
    step_loss,
)
from tests.vectors import STEPS, VECTORS, coefficients_of, tensor

KL_CASES = [name for name, case in STEPS.items() if "kl" in case]
SIGMAS = build_sigma_schedule("static_shift", 6, shift=3.0).sigmas
SHAPES = [(6, 4), (2, 3, 2, 4)]


@dataclass(frozen=True)
class Step:
    x: torch.Tensor
    x_next: torch.Tensor
    old_log_prob: torch.Tensor
    coefficients: StepCoefficients
    velocity: torch.Tensor
    trained: torch.Tensor


def drawn_step(
    kernel="flow_sde",
    level=0.7,
    steps=(0, 2, 3),
    stochastic=None,
    shape=(6, 4),
    dtype=torch.float64,
):
    c = step_coefficients(kernel, level, SIGMAS, list(steps), stochastic)
    rng = torch.Generator().manual_seed(0)
    x, v, noise = (torch.randn(len(steps), *shape, generator=rng, dtype=dtype) for _ in range(3))
    transition = draw_step(x, v, noise, c)
    step = Step(x, transition.x_next, transition.log_prob, c, velocity=v, trained=c.std > 0)
    return step, v, noise


def gradient(step, velocity, advantages, objective, reference=None):
    velocity = velocity.clone().requires_grad_()
    loss, stats = step_loss(velocity, step, advantages, objective, reference)
    loss.sum().backward()
    return velocity.grad, loss.detach(), stats


def close(actual, expected):
    torch.testing.assert_close(actual, tensor(expected), rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize(
    "case", VECTORS["policy_loss"]["cases"], ids=lambda c: str(c["clip_range"])
)
def test_policy_loss_equals_the_reference(case):
    group = VECTORS["policy_loss"]
    assert len(group["cases"]) == 3
    new = tensor(group["new_logp"]).requires_grad_()
    loss, stats = clipped_policy_loss(
        new,
        tensor(group["old_logp"]),
        tensor(group["advantages"]),
        case["clip_range"],
        case["adv_clip"],
    )
    loss.mean().backward()
    close(loss.detach(), case["per_sample"])
    close(loss.detach().mean(), case["policy_loss"])
    close(new.grad, case["dloss_dnew_logp"])
    close(stats["ratio"], case["ratio"])
    close(stats["policy_loss"], case["per_sample"])
    close(stats["approx_kl"].mean(), case["approx_kl"])
    close(stats["clip_fraction"].mean(), case["clipfrac"])
    close(stats["clip_fraction_high"].mean(), case["clipfrac_gt_one"])
    close(stats["clip_fraction_low"].mean(), case["clipfrac_lt_one"])


def test_on_policy_loss_is_minus_the_advantage_with_slope_minus_the_advantage():
    old = tensor([-0.9, -1.1, 0.4])
    new, advantages = old.clone().requires_grad_(), tensor([1.2, -0.7, 0.0])
    loss, _ = clipped_policy_loss(new, old, advantages, 1e-4, 5.0)
    loss.sum().backward()
    close(loss.detach(), [-1.2, 0.7, 0.0])
    assert torch.equal(new.grad, -advantages)


@pytest.mark.parametrize("form", ["grpo_guard", "flow_factory"])
def test_ratio_normalisation_equals_the_reference(form):
    group = VECTORS["ratio_norm"]
    case, expected = (
        STEPS[group["step_case"]],
        group[f"flow_{'grpo' if form == 'grpo_guard' else 'factory'}_guard"],
    )
    c, x, v = coefficients_of(case), tensor(case["x"]), tensor(case["v"])
    x_next = tensor(case["x_next"])
    old, old_mean = log_prob(x, v, x_next, c), transition_mean(x, v, c)
    step = Step(x, x_next, old, c, velocity=v, trained=torch.tensor([True, True]))
    objective = Objective(clip_range=group["clip_range"], ratio_norm=form)
    loss, stats = step_loss(tensor(case["v_new"]), step, tensor(group["advantages"]), objective)
    # the log-ratio itself is 1e-5: 1e-10 of the ratio is the reference file's tolerance
    v_new = tensor(case["v_new"])
    log_ratio = log_prob(x, v_new, x_next, c) - old
    normalised = normalised_log_ratio(log_ratio, transition_mean(x, v_new, c), old_mean, c)
    torch.testing.assert_close(normalised.exp(), tensor(expected["ratio"]), rtol=1e-10, atol=0)
    torch.testing.assert_close(stats["ratio"], normalised.exp(), rtol=1e-14, atol=0)
    torch.testing.assert_close(loss.mean(), tensor(expected["policy_loss"]), rtol=1e-10, atol=0)
    # "exact meaning": the log-ratio is the mean of noise * (mean - old mean)
    from_noise = (tensor(case["eps"]) * (tensor(case["mean_new"]) - tensor(case["mean"]))).flatten(
        1
    )
    torch.testing.assert_close(normalised, from_noise.mean(1), rtol=1e-7, atol=1e-14)


@pytest.mark.parametrize("shape", SHAPES)
def test_ratio_normalisation_scales_the_on_policy_gradient_by_std_over_minus_dt(shape):
    step, v, _ = drawn_step(shape=shape)
    advantages = tensor([1.5, -0.3, 0.7])
    plain, *_ = gradient(step, v, advantages, Objective())
    guard, loss, stats = gradient(step, v, advantages, Objective(ratio_norm="grpo_guard"))
    c = step.coefficients
    scale = (c.std / -c.dt).view(-1, *[1] * len(shape))
    torch.testing.assert_close(guard, plain * scale, rtol=1e-12, atol=1e-15)
    assert stats["ratio"].tolist() == [1.0] * 3
    torch.testing.assert_close(loss, -advantages / -c.dt)


def test_ratio_normalisation_refuses_a_log_prob_that_is_not_gaussian():
    Objective().check_kernel("cps")
    Objective(ratio_norm="grpo_guard").check_kernel("flow_sde")
    with pytest.raises(ValueError, match=r"grpo.ratio_norm='grpo_guard'.*sampling.kernel=cps"):
        Objective(ratio_norm="grpo_guard").check_kernel("cps")


def test_every_reference_kl_case_is_covered():
    assert len(KL_CASES) == 25


@pytest.mark.parametrize("name", KL_CASES)
def test_kl_forms_equal_the_reference(name):
    case, c = STEPS[name], coefficients_of(STEPS[name])
    v, v_new = tensor(case["v"]), tensor(case["v_new"])
    expected = {
        "mean_mse": "mse_mean",
        "velocity_mse": "mse_velocity",
        "flow_grpo": "over_2s2_no_dt",
        "exact": "over_2std2_with_dt",
    }
    assert set(expected) == set(KL_FORMS)
    for form, key in expected.items():
        values = case["kl"][key]
        if values is None:  # CPS has no amplitude per unit time: its s is its std
            values = case["kl"]["over_2std2_with_dt"]
        # the reference subtracts means, which differ by 1e-4 of their size: 4 digits are lost
        torch.testing.assert_close(
            reference_kl(form, v_new, v, c), tensor(values), rtol=1e-10, atol=1e-18
        )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", KL_FORMS)
def test_kl_gradient_is_added_to_the_policy_gradient_and_never_scaled_by_advantage(form, shape):
    step, v, _ = drawn_step(shape=shape)
    reference = v + 0.1 * torch.randn_like(v)
    zero, some = tensor([0.0, 0.0, 0.0]), tensor([1.5, -0.3, 0.7])
    objective = Objective(kl_beta=0.04, kl_form=form)
    only_kl, loss, stats = gradient(step, v, zero, objective, reference)
    own = v.clone().requires_grad_()
    (0.04 * reference_kl(form, own, reference, step.coefficients)).sum().backward()
    assert only_kl.abs().max() > 0
    torch.testing.assert_close(only_kl, own.grad)
    torch.testing.assert_close(loss, 0.04 * stats["kl"])
    both, *_ = gradient(step, v, some, objective, reference)
    policy, *_ = gradient(step, v, some, Objective())
    torch.testing.assert_close(both, policy + only_kl)


@pytest.mark.parametrize("form", KL_FORMS)
def test_kl_of_the_reference_itself_is_zero_with_zero_gradient(form):
    step, v, _ = drawn_step()
    objective = Objective(kl_beta=0.04, kl_form=form)
    grad, _, stats = gradient(step, v, tensor([0.0] * 3), objective, v)
    assert torch.equal(grad, torch.zeros_like(grad))
    assert stats["kl"].tolist() == [0.0] * 3


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("kernel", "level"), [("flow_sde", 0.7), ("dance_sde", 0.3), ("cps", 0.8)])
def test_on_policy_gradient_is_the_linear_form(kernel, level, shape):
    step, v, noise = drawn_step(kernel, level, shape=shape)
    advantages = tensor([1.5, -8.0, 0.7])
    grad, loss, stats = gradient(step, v, advantages, Objective(adv_clip=5.0))
    clipped = advantages.clamp(-5, 5)
    expected = -clipped.view(-1, *[1] * len(shape)) * on_policy_velocity_gradient(
        noise, step.coefficients
    )
    # x_next - mean loses digits of x_next that the noise still has
    torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-13)
    assert torch.equal(loss, -clipped)
    assert stats["ratio"].tolist() == [1.0] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kernel", ["flow_sde", "cps"])
def test_samples_that_do_not_train_a_step_have_exactly_no_loss_and_no_gradient(kernel, dtype):
    step, v, _ = drawn_step(
        kernel, steps=(0, 2, 5, 3), stochastic=[True, False, True, True], dtype=dtype
    )
    step = replace(step, trained=torch.tensor([True, False, False, False]))
    advantages = tensor([1.5, 3.0, -2.0, 0.7])
    # far off-policy: the ratio of an untrained sample overflows
    velocity = v.clone()
    velocity[1:] += 1e3
    reference = torch.zeros_like(velocity)
    for objective in (
        Objective(),
        Objective(kl_beta=0.1, kl_form="velocity_mse"),
        Objective(kl_beta=0.1, kl_form="exact"),
        *([Objective(ratio_norm="grpo_guard")] if kernel == "flow_sde" else []),
    ):
        grad, loss, _ = gradient(step, velocity, advantages, objective, reference)
        assert torch.equal(grad[1:], torch.zeros_like(grad[1:]))
        assert loss[1:].tolist() == [0.0] * 3
        assert grad[0].abs().max() > 0
        assert grad.isfinite().all()


def test_deterministic_samples_give_no_gradient_even_if_marked_as_trained():
    step, v, _ = drawn_step(steps=(0, 2, 3), stochastic=[True, False, False])
    step = replace(step, trained=torch.tensor([True, True, True]))
    velocity = v + 0.1
    for objective in (Objective(), Objective(ratio_norm="grpo_guard")):
        grad, loss, _ = gradient(step, velocity, tensor([1.0, 2.0, 3.0]), objective)
        assert torch.equal(grad[1:], torch.zeros_like(grad[1:]))
        assert loss.isfinite().all()
    for form in ("exact", "flow_grpo"):
        kl = reference_kl(form, velocity, v, step.coefficients)
        assert kl[1:].tolist() == [0.0, 0.0]


def test_bfloat16_velocity_is_scored_in_float32():
    step, v, _ = drawn_step(dtype=torch.float32)
    velocity = v.bfloat16()
    old = log_prob(step.x, velocity, step.x_next, step.coefficients)
    step = replace(step, old_log_prob=old)
    grad, loss, stats = gradient(step, velocity, tensor([1.0, -1.0, 0.5]), Objective())
    assert loss.dtype == torch.float32
    assert grad.dtype == torch.bfloat16
    assert stats["ratio"].tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        ({"clip_range": 0.0}, "grpo.clip_range"),
        ({"clip_range": float("nan")}, "grpo.clip_range"),
        ({"adv_clip": 0.0}, "grpo.adv_clip"),
        ({"ratio_norm": "guard"}, "grpo.ratio_norm"),
        ({"kl_beta": -0.1}, "grpo.kl_beta"),
        ({"kl_form": "k3"}, "grpo.kl_form"),
    ],
)
def test_bad_settings_are_named(options, setting):
    with pytest.raises(ValueError, match=setting):
        Objective(**options)
