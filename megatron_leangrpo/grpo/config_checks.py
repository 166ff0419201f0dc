# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Settings that can be judged by themselves: bounds of numbers, and what an optimizer can do.

What depends on the model, the files or the layout is checked where that is known.
"""

import math
from typing import Any

from megatron_leangrpo.config import RunConfig
from megatron_leangrpo.grpo.adaptation import check_lora
from megatron_leangrpo.grpo.advantages import CONVENTIONS
from megatron_leangrpo.grpo.architecture import DTYPES
from megatron_leangrpo.grpo.optimization import check_dtype
from megatron_leangrpo.reporting.metrics import import_wandb

_AT_LEAST = {
    "model.guidance_scale": 0,
    "model.max_text_tokens": 1,
    "sampling.num_frames": 1,
    "sampling.cfg_scale": 1,
    "lora.rank": 0,
    "parallel.timeout_seconds": 1,
    "parallel.context_parallel_size": 1,
    "parallel.pipeline_model_parallel_size": 1,
    "parallel.pipeline_waves_in_flight": 0,
    "grpo.iterations": 1,
    "grpo.prompts_per_iteration": 1,
    "grpo.group_size": 1,
    "grpo.micro_batch_size": 1,
    "grpo.updates_per_rollout": 1,
    "grpo.jagg_window": 1,
    "grpo.jagg_check_interval": 0,
    "optimizer.lr": 0,
    "optimizer.min_lr": 0,
    "optimizer.lr_warmup_updates": 0,
    "optimizer.weight_decay": 0,
    "optimizer.adam_beta1": 0,
    "optimizer.adam_beta2": 0,
    "optimizer.adam_eps": 0,
    "optimizer.clip_grad": 0,
    "optimizer.ema_decay": 0,
    "optimizer.ema_interval": 1,
    "evaluation.interval": 0,
    "evaluation.num_steps": 1,
    "evaluation.samples_per_prompt": 1,
    "evaluation.max_prompts": 1,
    "evaluation.micro_batch_size": 1,
    "evaluation.grid_images": 1,
    "checkpoint.interval": -1,
    "checkpoint.export_interval": -1,
    "checkpoint.keep": 1,
    "operations.rollbacks": 0,
}
_BELOW_ONE = ("optimizer.adam_beta1", "optimizer.adam_beta2", "optimizer.ema_decay")


def check_bounds(config: RunConfig) -> None:
    """Raise ``ValueError`` for a number outside its bounds, whatever the command."""
    for key, least in _AT_LEAST.items():
        value = _value(config, key)
        if not (math.isfinite(value) and value >= least):
            raise ValueError(f"{key} = {value} must be {least} or more")
    for key in _BELOW_ONE:
        if _value(config, key) >= 1:
            raise ValueError(f"{key} = {_value(config, key)} must be at least 0 and below 1")
    low = config.sampling.cfg_scale_2
    if low is not None and not (math.isfinite(low) and low >= 1):
        raise ValueError(f"sampling.cfg_scale_2 = {low} must be 1 or more")
    if low is not None and config.sampling.cfg_scale == 1:
        raise ValueError(
            f"sampling.cfg_scale_2 = {low}: there is no guidance at high noise, because "
            "sampling.cfg_scale is 1; set that above 1"
        )
    if not 0 <= config.grpo.jagg_frac <= 1:
        raise ValueError(f"grpo.jagg_frac = {config.grpo.jagg_frac} must be between 0 and 1")
    if config.optimizer.adam_eps == 0:
        raise ValueError("optimizer.adam_eps = 0 must be above 0, such as 1e-8")
    check_lora(config.lora, config.grpo.reference_offload)


def check_training(config: RunConfig) -> None:
    """Raise ``ValueError`` for settings under which no optimizer step could be taken as asked."""
    _check_learning_rate(config)
    check_dtype(DTYPES[config.model.dtype])
    grpo = config.grpo
    if grpo.group_size == 1 and CONVENTIONS[grpo.advantage].baseline == "group":
        raise ValueError(
            f"grpo.group_size = 1: grpo.advantage = {grpo.advantage} compares the samples of a "
            "prompt with each other and would train nothing; valid: 2 or more"
        )
    _check_rollbacks(config)
    if config.wandb:
        import_wandb()


def _check_rollbacks(config: RunConfig) -> None:
    operations = config.operations
    if not 0 < operations.rollback_lr_factor <= 1:
        raise ValueError(
            f"operations.rollback_lr_factor = {operations.rollback_lr_factor} must be above 0 and "
            "at most 1"
        )
    saved, evaluated = config.checkpoint.interval, config.evaluation.interval
    if operations.rollbacks and (saved < 1 or evaluated < 1):
        raise ValueError(
            f"operations.rollbacks = {operations.rollbacks} needs evaluated checkpoints to go back "
            f"to, but checkpoint.interval = {saved} and evaluation.interval = {evaluated}; valid: "
            "1 or more for both"
        )
    together = math.lcm(saved, evaluated) if operations.rollbacks else 0
    if together >= config.grpo.iterations:
        raise ValueError(
            f"operations.rollbacks = {operations.rollbacks}: checkpoint.interval = {saved} and "
            f"evaluation.interval = {evaluated} first meet after iteration {together} of "
            f"{config.grpo.iterations}, so that there is nothing to go back to; valid: equal ones "
            f"below {config.grpo.iterations}"
        )


def _check_learning_rate(config: RunConfig) -> None:
    optimizer = config.optimizer
    if optimizer.min_lr > optimizer.lr:
        raise ValueError(
            f"optimizer.min_lr = {optimizer.min_lr} is above optimizer.lr = {optimizer.lr}; "
            f"valid: 0 to {optimizer.lr}"
        )
    updates = config.grpo.iterations * config.grpo.updates_per_rollout
    if optimizer.lr_warmup_updates > updates:
        raise ValueError(
            f"optimizer.lr_warmup_updates = {optimizer.lr_warmup_updates} does not fit into the "
            f"run's {updates} update{'s' if updates > 1 else ''} (grpo.iterations x "
            f"grpo.updates_per_rollout); valid: 0 to {updates}"
        )


def _value(config: RunConfig, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)
