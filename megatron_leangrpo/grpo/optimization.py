# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Megatron's data-parallel wrapper, optimizer, learning-rate schedule, and an update with them."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.autograd.graph import increment_version

from megatron_leangrpo import platform
from megatron_leangrpo.config import OptimizerConfig


def wrap_data_parallel(
    model: torch.nn.Module, use_distributed_optimizer: bool, overlap_grad_reduce: bool = False
) -> torch.nn.Module:
    """Wrap `model` so that gradients collect in contiguous float32 (or wider) buffers.

    Nothing is reduced during the backwards of an update; `reduce_gradients` does it once.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config = DistributedDataParallelConfig(
        use_distributed_optimizer=use_distributed_optimizer,
        overlap_grad_reduce=overlap_grad_reduce,
        grad_reduce_in_fp32=next(model.parameters()).dtype == torch.bfloat16,
    )
    return DistributedDataParallel(model.config, config, model)


@contextmanager
def collecting_gradients(model: torch.nn.Module) -> Iterator[None]:
    """Collect the gradient of an update, from nothing, in any number of backwards.

    Megatron's overlapped reduction counts the backwards of the first update and expects as many in
    every other; jagg has fewer once it has scores, and a replayed update more.
    """
    zero_gradients(model)
    with model.no_sync():
        yield


def zero_gradients(model: torch.nn.Module) -> None:
    """Empty the gradient buffers."""
    model.zero_grad_buffer()
    # Without the distributed optimizer, megatron's step leaves the buffer in `grad`; the next
    # backward would accumulate there and the wrapper add it to the buffer once more.
    for parameter in model.parameters():
        parameter.grad = None


def reduce_gradients(model: torch.nn.Module, whole: bool = False) -> None:
    """Sum gradients over data-parallel ranks, then over tensor-parallel ranks where due; once.

    With the distributed optimizer a rank ends with the sum of its own shard only, unless `whole`.
    """
    from megatron.core.distributed import finalize_model_grads

    with platform.host_mode():
        finalize_model_grads([model], force_all_reduce=whole)


@dataclass
class Optimization:
    """The optimizer and its schedule, counted in updates."""

    model: torch.nn.Module
    optimizer: object
    scheduler: object
    config: OptimizerConfig

    @property
    def updates(self) -> int:
        """Updates taken so far, over resumes."""
        return self.scheduler.num_steps

    def step(self) -> tuple[float, float]:
        """Clip, update the weights, and return (gradient norm, learning rate) of this update.

        The schedule advances first: update 1 of a warm-up has a learning rate above 0 (a rollout is
        too dear to be thrown away) and the last update of a run has `optimizer.min_lr`. A gradient
        that is not finite raises before the weights change.
        """
        with platform.host_mode():
            self.optimizer.prepare_grads()
            grad_norm = float(self.optimizer.get_grad_norm())
            if not math.isfinite(grad_norm):
                raise FloatingPointError(
                    f"gradient norm is {grad_norm} at update {self.updates + 1}; "
                    "the weights are those of the update before"
                )
            self.scheduler.step(1)
            self.optimizer.step()
        # megatron writes bfloat16 weights and gathered shards behind autograd's back. With this, a
        # graph kept from before the update raises instead of mixing it with the new weights.
        increment_version(list(self.model.parameters()))
        return grad_norm, float(self.optimizer.param_groups[0]["lr"])


def check_dtype(dtype: torch.dtype) -> None:
    """Raise ``ValueError`` for weights that megatron's optimizer cannot update."""
    if dtype == torch.float64:
        raise ValueError(
            "model.dtype = float64: megatron's optimizer has no float64; valid for training: "
            "float32, bfloat16 (leangrpo compare takes float64)"
        )


def build_optimization(
    model: torch.nn.Module, config: OptimizerConfig, total_updates: int
) -> Optimization:
    """Build AdamW (sharded over data-parallel ranks on request) and its learning-rate schedule.

    The settings are those that `config_checks` lets pass.
    """
    from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    dtype = next(model.parameters()).dtype
    check_dtype(dtype)
    settings = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_eps=config.adam_eps,
        clip_grad=config.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=config.use_distributed_optimizer,
    )
    with platform.host_mode():
        optimizer = get_megatron_optimizer(settings, [model])
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.lr_warmup_updates,
        lr_decay_steps=max(total_updates, config.lr_warmup_updates + 1),
        lr_decay_style=config.lr_decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=total_updates,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    return Optimization(model, optimizer, scheduler, config)
