# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The clipped objective, ratio normalisation and KL terms against the reference numbers."""

from dataclasses import replace

import pytest
import torch

from megatron_leangrpo.diffusion.kernels import (
    draw_step,
    log_prob,
    on_policy_velocity_gradient,
    step_coefficients,
    transition_mean,
)
from megatron_leangrpo.diffusion.sigmas import build_sigma_schedule
from megatron_leangrpo.grpo.objective import (
    KL_FORMS,
    ObjectiveConfig,
    StepBatch,
    clipped_policy_loss,
    normalised_log_ratio,
    reference_kl,
    step_loss,
)
from tests.vectors import STEPS, VECTORS, coefficients_of, tensor

KL_CASES = [name for name, case in STEPS.items() if "kl" in case]
SIGMAS = build_sigma_schedule("static_shift", 6, shift=3.0).sigmas
SHAPES = [(6, 4), (2, 3, 2, 4)]


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
    batch = StepBatch(
        x, transition.x_next, transition.log_prob, c, weights=c.std > 0, old_mean=transition.mean
    )
    return batch, v, noise


def gradient(batch, velocity, advantages, objective, reference=None):
    velocity = velocity.clone().requires_grad_()
    loss, statistics = step_loss(velocity, batch, advantages, objective, reference)
    loss.sum().backward()
    return velocity.grad, loss.detach(), statistics.metrics()


def close(actual, expected):
    torch.testing.assert_close(actual, tensor(expected), rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize(
    "case", VECTORS["policy_loss"]["cases"], ids=lambda c: str(c["clip_range"])
)
def test_policy_loss_equals_the_reference(case):
    group = VECTORS["policy_loss"]
    assert len(group["cases"]) == 3
    new = tensor(group["new_logp"]).requires_grad_()
    loss, statistics = clipped_policy_loss(
        new,
        tensor(group["old_logp"]),
        tensor(group["advantages"]),
        case["clip_range"],
        case["adv_clip"],
    )
    loss.mean().backward()
    close((new.detach() - tensor(group["old_logp"])).exp(), case["ratio"])
    close(loss.detach(), case["per_sample"])
    close(loss.detach().mean(), case["policy_loss"])
    close(new.grad, case["dloss_dnew_logp"])
    metrics = statistics.metrics()
    for name in ("policy_loss", "approx_kl", "clipfrac", "clipfrac_gt_one", "clipfrac_lt_one"):
        assert metrics[name] == pytest.approx(case[name], rel=1e-10)
    assert metrics["ratio_min"] == pytest.approx(min(case["ratio"]), rel=1e-12)
    assert metrics["ratio_max"] == pytest.approx(max(case["ratio"]), rel=1e-12)
    assert metrics["ratio_mean"] == pytest.approx(sum(case["ratio"]) / 6, rel=1e-12)
    assert metrics["kl_loss"] == 0


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
    batch = StepBatch(x, x_next, old, c, old_mean=old_mean)
    objective = ObjectiveConfig(clip_range=group["clip_range"], ratio_norm=form)
    loss, _ = step_loss(tensor(case["v_new"]), batch, tensor(group["advantages"]), objective)
    # the log-ratio itself is 1e-5: 1e-10 of the ratio is the reference file's tolerance
    v_new = tensor(case["v_new"])
    log_ratio = log_prob(x, v_new, x_next, c) - old
    normalised = normalised_log_ratio(log_ratio, transition_mean(x, v_new, c), old_mean, c)
    torch.testing.assert_close(normalised.exp(), tensor(expected["ratio"]), rtol=1e-10, atol=0)
    torch.testing.assert_close(loss.mean(), tensor(expected["policy_loss"]), rtol=1e-10, atol=0)
    # "exact meaning": the log-ratio is the mean of noise * (mean - old mean)
    from_noise = (tensor(case["eps"]) * (tensor(case["mean_new"]) - tensor(case["mean"]))).flatten(
        1
    )
    torch.testing.assert_close(normalised, from_noise.mean(1), rtol=1e-7, atol=1e-14)


@pytest.mark.parametrize("shape", SHAPES)
def test_ratio_normalisation_scales_the_on_policy_gradient_by_std_over_minus_dt(shape):
    batch, v, _ = drawn_step(shape=shape)
    advantages = tensor([1.5, -0.3, 0.7])
    plain, *_ = gradient(batch, v, advantages, ObjectiveConfig())
    guard, loss, stats = gradient(batch, v, advantages, ObjectiveConfig(ratio_norm="grpo_guard"))
    c = batch.coefficients
    scale = (c.std / -c.dt).view(-1, *[1] * len(shape))
    torch.testing.assert_close(guard, plain * scale, rtol=1e-12, atol=1e-15)
    assert stats["ratio_min"] == stats["ratio_max"] == 1.0
    torch.testing.assert_close(loss, -advantages / -c.dt)


def test_ratio_normalisation_refuses_a_log_prob_that_is_not_gaussian():
    ObjectiveConfig().check_kernel("cps")
    ObjectiveConfig(ratio_norm="grpo_guard").check_kernel("flow_sde")
    with pytest.raises(ValueError, match=r"grpo.ratio_norm='grpo_guard'.*sampling.kernel=cps"):
        ObjectiveConfig(ratio_norm="grpo_guard").check_kernel("cps")


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
    batch, v, _ = drawn_step(shape=shape)
    reference = v + 0.1 * torch.randn_like(v)
    zero, some = tensor([0.0, 0.0, 0.0]), tensor([1.5, -0.3, 0.7])
    objective = ObjectiveConfig(kl_beta=0.04, kl_form=form)
    only_kl, loss, stats = gradient(batch, v, zero, objective, reference)
    own = v.clone().requires_grad_()
    (0.04 * reference_kl(form, own, reference, batch.coefficients)).sum().backward()
    assert only_kl.abs().max() > 0
    torch.testing.assert_close(only_kl, own.grad)
    assert loss.mean().item() == pytest.approx(0.04 * stats["kl_loss"], rel=1e-12)
    both, *_ = gradient(batch, v, some, objective, reference)
    policy, *_ = gradient(batch, v, some, ObjectiveConfig())
    torch.testing.assert_close(both, policy + only_kl)


@pytest.mark.parametrize("form", KL_FORMS)
def test_kl_of_the_reference_itself_is_zero_with_zero_gradient(form):
    batch, v, _ = drawn_step()
    objective = ObjectiveConfig(kl_beta=0.04, kl_form=form)
    grad, _, stats = gradient(batch, v, tensor([0.0] * 3), objective, v)
    assert torch.equal(grad, torch.zeros_like(grad))
    assert stats["kl_loss"] == 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("kernel", "level"), [("flow_sde", 0.7), ("dance_sde", 0.3), ("cps", 0.8)])
def test_on_policy_gradient_is_the_linear_form(kernel, level, shape):
    batch, v, noise = drawn_step(kernel, level, shape=shape)
    advantages = tensor([1.5, -8.0, 0.7])
    grad, loss, stats = gradient(batch, v, advantages, ObjectiveConfig(adv_clip=5.0))
    clipped = advantages.clamp(-5, 5)
    expected = -clipped.view(-1, *[1] * len(shape)) * on_policy_velocity_gradient(
        noise, batch.coefficients
    )
    # x_next - mean loses digits of x_next that the noise still has
    torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-13)
    assert torch.equal(loss, -clipped)
    assert stats["ratio_min"] == stats["ratio_max"] == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kernel", ["flow_sde", "cps"])
def test_samples_that_do_not_train_a_step_have_exactly_no_loss_and_no_gradient(kernel, dtype):
    batch, v, _ = drawn_step(
        kernel, steps=(0, 2, 5, 3), stochastic=[True, False, True, True], dtype=dtype
    )
    batch = replace(batch, weights=torch.tensor([True, False, False, False]))
    advantages = tensor([1.5, 3.0, -2.0, 0.7])
    # far off-policy: the ratio of an untrained sample overflows
    velocity = v.clone()
    velocity[1:] += 1e3
    reference = torch.zeros_like(velocity)
    for objective in (
        ObjectiveConfig(),
        ObjectiveConfig(kl_beta=0.1, kl_form="velocity_mse"),
        ObjectiveConfig(kl_beta=0.1, kl_form="exact"),
        *([ObjectiveConfig(ratio_norm="grpo_guard")] if kernel == "flow_sde" else []),
    ):
        grad, loss, _ = gradient(batch, velocity, advantages, objective, reference)
        assert torch.equal(grad[1:], torch.zeros_like(grad[1:]))
        assert loss[1:].tolist() == [0.0] * 3
        assert grad[0].abs().max() > 0
        assert grad.isfinite().all()


def test_deterministic_samples_give_no_gradient_even_if_marked_as_trained():
    batch, v, _ = drawn_step(steps=(0, 2, 3), stochastic=[True, False, False])
    batch = replace(batch, weights=None)
    velocity = v + 0.1
    for objective in (ObjectiveConfig(), ObjectiveConfig(ratio_norm="grpo_guard")):
        grad, loss, _ = gradient(batch, velocity, tensor([1.0, 2.0, 3.0]), objective)
        assert torch.equal(grad[1:], torch.zeros_like(grad[1:]))
        assert loss.isfinite().all()
    for form in ("exact", "flow_grpo"):
        kl = reference_kl(form, velocity, v, batch.coefficients)
        assert kl[1:].tolist() == [0.0, 0.0]


def test_weights_scale_the_loss_of_their_sample():
    batch, v, _ = drawn_step()
    advantages = tensor([1.5, -0.3, 0.7])
    plain, *_ = gradient(batch, v, advantages, ObjectiveConfig())
    weights = tensor([2.0, 0.0, 0.5])
    weighted, *_ = gradient(replace(batch, weights=weights), v, advantages, ObjectiveConfig())
    torch.testing.assert_close(weighted, plain * weights.view(3, 1, 1))


def test_statistics_of_parts_add_up_to_those_of_the_whole():
    batch, v, _ = drawn_step()
    old = batch.old_log_prob + tensor([0.0, 2e-4, -3e-4])
    batch = replace(batch, old_log_prob=old, weights=torch.tensor([True, True, False]))
    advantages, objective = tensor([1.5, -0.3, 0.7]), ObjectiveConfig()
    _, whole = step_loss(v, batch, advantages, objective)
    parts = [
        step_loss(v, replace(batch, weights=weights), advantages, objective)[1]
        for weights in torch.eye(3)[:2]
    ]
    total = (parts[0] + parts[1]).metrics()
    assert total == pytest.approx(whole.metrics(), rel=1e-12)
    assert total["ratio_max"] == 1.0
    assert total["clipfrac_lt_one"] == 0.5
    nothing = step_loss(v, replace(batch, weights=torch.zeros(3)), advantages, objective)[1]
    assert nothing.metrics() == {}
    assert (nothing + whole).metrics() == whole.metrics()


def test_bfloat16_velocity_is_scored_in_float32():
    batch, v, _ = drawn_step(dtype=torch.float32)
    velocity = v.bfloat16()
    old = log_prob(batch.x, velocity, batch.x_next, batch.coefficients)
    batch = replace(batch, old_log_prob=old)
    grad, loss, stats = gradient(batch, velocity, tensor([1.0, -1.0, 0.5]), ObjectiveConfig())
    assert loss.dtype == torch.float32
    assert grad.dtype == torch.bfloat16
    assert stats["ratio_min"] == stats["ratio_max"] == 1.0


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
        ObjectiveConfig(**options)
