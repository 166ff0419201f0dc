# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The weight average follows Flow-GRPO's rule and can stand in for the live weights."""

import pytest
import torch

from megatron_leangrpo.grpo.ema import WeightAverage, ema_decay
from tests.vectors import VECTORS


def constant_model(value: float, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    model = torch.nn.Linear(2, 3, dtype=dtype)
    set_weights(model, value)
    return model


def set_weights(model: torch.nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def test_the_average_equals_the_reference_numbers():
    reference = VECTORS["ema"]
    model = constant_model(reference["start_ema"])
    average = WeightAverage(model, cap=0.9, interval=8)
    for row in reference["rows"]:
        set_weights(model, row["param"])
        average.update(model, row["step"])
        assert ema_decay(row["step"], 0.9) == pytest.approx(row["decay"], rel=1e-15)
        for value in average.values.values():
            torch.testing.assert_close(
                value, torch.full_like(value, row["ema"]), rtol=1e-14, atol=0
            )


def test_the_cap_and_the_interval_are_obeyed():
    assert ema_decay(1000, cap=0.95) == 0.95
    model = constant_model(0.0)
    average = WeightAverage(model, cap=0.5, interval=1)
    set_weights(model, 1.0)
    average.update(model, updates=100)
    assert all((value == 0.5).all() for value in average.values.values())


def test_a_bfloat16_model_has_a_float32_average():
    """Steps of 1 / 1000 of a weight would be lost in bfloat16."""
    model = constant_model(1.0, torch.bfloat16)
    average = WeightAverage(model, cap=0.999, interval=1)
    set_weights(model, 2.0)
    average.update(model, updates=100_000)
    for value in average.values.values():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, torch.full_like(value, 1.001))


def test_live_weights_come_back_bit_for_bit_also_after_an_error():
    model = torch.nn.Linear(2, 3)
    live = {name: p.detach().clone() for name, p in model.named_parameters()}
    average = WeightAverage(model, cap=0.9, interval=1)
    for value in average.values.values():
        value.zero_()

    def evaluate() -> None:
        with average.applied(model):
            assert all((p == 0).all() for p in model.parameters())
            raise RuntimeError("evaluation failed")

    with pytest.raises(RuntimeError, match="evaluation failed"):
        evaluate()
    assert all(torch.equal(p, live[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize(
    ("cap", "interval", "setting"), [(1.0, 8, "ema_decay"), (0.9, 0, "ema_interval")]
)
def test_settings_without_meaning_are_refused(cap, interval, setting):
    with pytest.raises(ValueError, match=rf"optimizer\.{setting}"):
        WeightAverage(constant_model(0.0), cap, interval)
