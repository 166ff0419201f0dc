# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""A number that is none is named with its step, sample and tensor."""

from __future__ import annotations

import pytest
import torch

from megatron_leangrpo.operations.finite import NotFiniteError, check_gradients, check_steps

SAMPLES = ["prompt 3 sample 0", "prompt 3 sample 1"]
TENSORS = ("velocity", "log-probability")


def test_the_first_step_is_named_with_its_samples_and_the_tensor_that_came_first():
    finite = torch.ones(4, len(TENSORS), len(SAMPLES), dtype=torch.bool)
    check_steps(finite, TENSORS, SAMPLES, "iteration 7's rollout")
    finite[2, 0, 1] = finite[2, 1] = finite[3] = False
    message = (
        r"^velocity of prompt 3 sample 1 is not finite in step 3 of 4 of iteration 7's rollout"
    )
    with pytest.raises(NotFiniteError, match=message):
        check_steps(finite, TENSORS, SAMPLES, "iteration 7's rollout")
    finite[1, 1] = False
    message = r"^log-probability of prompt 3 sample 0, prompt 3 sample 1 is not finite in step 2 of"
    with pytest.raises(NotFiniteError, match=message):
        check_steps(finite, TENSORS, SAMPLES, "iteration 7's rollout")


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
