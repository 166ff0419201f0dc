# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Numbers that no run can have; that every command asks is tested in tests/test_cli.py."""

from __future__ import annotations

from math import inf, nan

import pytest

from megatron_leangrpo.config import RunConfig
from megatron_leangrpo.grpo.config_checks import check_bounds, check_training
from tests.grpo import tiny

OUT_OF_BOUNDS = {
    "optimizer.lr": (-1.0, "0 or more"),
    "optimizer.min_lr": (1.0, "is above optimizer.lr"),
    "optimizer.weight_decay": (inf, "0 or more"),
    "optimizer.clip_grad": (nan, "0 or more"),
    "optimizer.adam_beta1": (-0.1, "0 or more"),
    "optimizer.adam_beta2": (1.0, "below 1"),
    "optimizer.adam_eps": (0, "above 0"),
    "optimizer.ema_decay": (1.0, "below 1"),
    "optimizer.ema_interval": (0, "1 or more"),
    "grpo.iterations": (0, "1 or more"),
    "grpo.micro_batch_size": (-1, "1 or more"),
    "grpo.prompts_per_iteration": (0, "1 or more"),
    "grpo.jagg_window": (0, "1 or more"),
    "grpo.jagg_frac": (1.5, "between 0 and 1"),
    "grpo.jagg_check_interval": (-1, "0 or more"),
    "sampling.num_frames": (0, "1 or more"),
    "sampling.cfg_scale": (nan, "1 or more"),
    "model.max_text_tokens": (0, "1 or more"),
    "model.guidance_scale": (nan, "0 or more"),
    "evaluation.interval": (-1, "0 or more"),
    "evaluation.samples_per_prompt": (0, "1 or more"),
    "evaluation.max_prompts": (0, "1 or more"),
    "evaluation.grid_images": (0, "1 or more"),
    "checkpoint.interval": (-2, "-1 or more"),
    "parallel.timeout_seconds": (0, "1 or more"),
}


def _check(config: RunConfig) -> None:
    check_bounds(config)
    check_training(config)


@pytest.mark.parametrize("key", OUT_OF_BOUNDS)
def test_a_number_out_of_bounds_is_refused_by_name_and_value(key):
    value, valid = OUT_OF_BOUNDS[key]
    section, name = key.split(".")
    config = tiny.tiny_config("prompts.txt", **{section: {name: value}})
    with pytest.raises(ValueError) as error:
        _check(config)
    assert f"{key} = {value}" in str(error.value)
    assert valid in str(error.value)


def test_the_bounds_themselves_are_valid():
    limits = {"min_lr": 1e-3, "lr_warmup_updates": 4, "adam_beta1": 0.0, "clip_grad": 0.0}
    _check(tiny.tiny_config("prompts.txt", optimizer={"lr": 1e-3, **limits}))
    _check(tiny.tiny_config("prompts.txt", optimizer={"lr": 0.0}, evaluation={"interval": 0}))
    _check(tiny.tiny_config("p.txt", grpo={"group_size": 1, "advantage": "dance_global"}))
