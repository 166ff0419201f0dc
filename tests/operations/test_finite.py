# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""A number that is none is named with its step, sample and tensor."""

from __future__ import annotations

import pytest
import torch

from megatron_leangrpo.operations.finite import NotFiniteError, check_gradients, check_step

SAMPLES = ["prompt 3 sample 0", "prompt 3 sample 1"]


def tensors() -> dict[str, torch.Tensor]:
    return {"velocity": torch.ones(2, 4, 3), "log-probability": torch.zeros(2)}


def test_finite_steps_pass_whatever_their_size():
    huge = {"velocity": torch.full((2, 4), 3e38)}
    check_step(huge, SAMPLES, 1, 0)
    check_step(tensors(), SAMPLES, 1, 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_the_sample_and_the_first_tensor_are_named(value):
    spoilt = tensors()
    spoilt["velocity"][1, 2, 0] = value
    spoilt["log-probability"][:] = value
    kind = "1 NaN and 0 Inf" if value != value else "0 NaN and 1 Inf"
    message = rf"velocity of prompt 3 sample 1 is not finite in step 5 of iteration 7: {kind} of 24"
    with pytest.raises(NotFiniteError, match=message):
        check_step(spoilt, SAMPLES, 7, 5)


def test_a_spoilt_gradient_is_named_before_the_step():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    check_gradients(model, 1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    check_gradients(model, 1)
    # As in megatron's buffers, which count where they are there.
    model[1].bias.main_grad = torch.tensor([1.0, float("nan")])
    with pytest.raises(NotFiniteError, match=r"gradient of 1\.bias is not finite in iteration 2"):
        check_gradients(model, 2)
