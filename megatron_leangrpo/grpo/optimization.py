# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Megatron's optimizer and learning-rate schedule, and an update with them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import increment_version

from megatron_leangrpo import platform
from megatron_leangrpo.config import OptimizerConfig
from megatron_leangrpo.grpo.data_parallel import wrappers_of
from megatron_leangrpo.models.experts import NAMES


@dataclass
class Optimization:
    """The optimizer and its schedule, counted in updates."""

    model: torch.nn.Module
    optimizer: Any
    scheduler: Any
    config: OptimizerConfig

    @property
    def updates(self) -> int:
        """Updates taken so far, over resumes."""
        return self.scheduler.num_steps

    def step(self) -> dict[str, float]:
        """Clip, update the weights, and return the gradient norm and learning rate of this update.

        A gradient that is not finite raises before the weights change.
        """
        grad_norm = self.prepare()
        self.update_weights()
        return {"grad_norm": grad_norm, "learning_rate": self.learning_rate}

    def prepare(self) -> float:
        """Return the norm of the gradient; ``FloatingPointError`` where it is not finite."""
        with platform.host_mode():
            self.optimizer.prepare_grads()
            grad_norm = float(self.optimizer.get_grad_norm())
        if not math.isfinite(grad_norm):
            raise FloatingPointError(
                f"gradient norm is {grad_norm} at update {self.updates + 1}; "
                "the weights are those of the update before"
            )
        return grad_norm

    def update_weights(self) -> None:
        """Advance the schedule, clip, and step.

        The schedule advances first: update 1 of a warm-up has a learning rate above 0 (a rollout is
        too dear to be thrown away) and the last update of a run has `optimizer.min_lr`.
        """
        with platform.host_mode():
            self.scheduler.step(1)
            self.optimizer.step()
        # megatron writes bfloat16 weights and gathered shards behind autograd's back. With this, a
        # graph kept from before the update raises instead of mixing it with the new weights.
        increment_version(list(self.model.parameters()))

    @property
    def learning_rate(self) -> float:
        """Of the last update."""
        return float(self.optimizer.param_groups[0]["lr"])


class ExpertOptimization:
    """Two experts' optimizations; an update steps those that it has a gradient for.

    The other one keeps its weights, its moments and its place in the learning-rate schedule. Where
    no expert has a gradient, nobody moves.
    """

    def __init__(self, parts: Sequence[Optimization]) -> None:
        self._parts = dict(zip(NAMES, parts, strict=True))
        self.optimizer = ExpertOptimizers({n: part.optimizer for n, part in self._parts.items()})
        self.scheduler = ExpertSchedulers({n: part.scheduler for n, part in self._parts.items()})

    @property
    def updates(self) -> int:
        """Updates of any expert so far, over resumes."""
        return self.scheduler.num_steps

    def step(self) -> dict[str, float]:
        """Update the weights and return norms and learning rates, together and of each expert.

        A gradient that is not finite raises before any weights change.
        """
        norms = {name: part.prepare() for name, part in self._parts.items()}
        trained = [self._parts[name] for name, norm in norms.items() if norm > 0]
        for part in trained:
            part.update_weights()
        self.scheduler.num_steps += 1
        return {
            "grad_norm": math.hypot(*norms.values()),
            "learning_rate": max(part.learning_rate for part in self._parts.values()),
            **{f"grad_norm_{name}": norm for name, norm in norms.items()},
            **{f"learning_rate_{name}": part.learning_rate for name, part in self._parts.items()},
        }


class ExpertOptimizers:
    """Megatron's optimizers by expert, as a checkpoint sees them."""

    def __init__(self, experts: Mapping[str, Any]) -> None:
        self.experts = dict(experts)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all."""
        return [group for part in self.experts.values() for group in part.param_groups]

    @property
    def chained_optimizers(self) -> list[Any]:
        """What each consists of."""
        return [part for expert in self.experts.values() for part in expert.chained_optimizers]

    def sharded_state_dict(self, model: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        """The state of each, given megatron's terms of both experts' weights."""
        return {
            name: expert.sharded_state_dict(
                {key: value for key, value in model.items() if key.startswith(f"{name}.")},
                **options,
            )
            for name, expert in self.experts.items()
        }


class ExpertSchedulers:
    """Learning-rate schedules by expert, and how many updates there were of any."""

    def __init__(self, experts: Mapping[str, Any]) -> None:
        self._experts = dict(experts)
        self.num_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """The position of each, and the count."""
        states = {name: expert.state_dict() for name, expert in self._experts.items()}
        return {**states, "num_steps": self.num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a stored position."""
        self.num_steps = state["num_steps"]
        for name, expert in self._experts.items():
            expert.load_state_dict(state[name])


def check_dtype(dtype: torch.dtype) -> None:
    """Raise ``ValueError`` for weights that megatron's optimizer cannot update."""
    if dtype == torch.float64:
        raise ValueError(
            "model.dtype = float64: megatron's optimizer has no float64; valid for training: "
            "float32, bfloat16 (leangrpo compare takes float64)"
        )


def build_optimization(
    model: torch.nn.Module, config: OptimizerConfig, total_updates: int
) -> "Optimization | ExpertOptimization":
    """Build AdamW (sharded over data-parallel ranks on request) and its learning-rate schedule.

    Each of two experts has both for itself. The settings are those that `config_checks` lets pass.
    """
    parts = [_build_for(wrapper, config, total_updates) for wrapper in wrappers_of(model)]
    return parts[0] if len(parts) == 1 else ExpertOptimization(parts)


def _build_for(model: torch.nn.Module, config: OptimizerConfig, total_updates: int) -> Optimization:
    from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    dtype = model.config.params_dtype
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
