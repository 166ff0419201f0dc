# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The tensor-parallel linear layers of every model here; all tensors are `[s, b, h]`.

They keep megatron's parameters and attributes, return the output alone, and multiply with torch's
own linear wherever no collective is tied to the product. Their collectives are megatron's, or those
of `overlap` where the configuration asks for them. Each may have a low-rank adapter (`lora`).
"""

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_leangrpo import platform
from megatron_leangrpo.overlap.linear import column_parallel, row_parallel
from megatron_leangrpo.overlap.plan import LinearPlan, Operands, prepare
from megatron_leangrpo.overlap.query_split import LaterRows
from megatron_leangrpo.overlap.settings import OverlapSettings
from megatron_leangrpo.overlap.weight_grad import WeightGradient
from megatron_leangrpo.parallel.mappings import enter_tensor_parallel, reduce_partial_sums


def _leave_uninitialised(weight: torch.Tensor) -> torch.Tensor:
    return weight


def mark_sharded(weight: torch.nn.Parameter, dim: int) -> None:
    """Set what megatron sets only when it initialises: the gradient norm counts it on all ranks."""
    if not hasattr(weight, "tensor_model_parallel"):
        set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=dim, stride=1)


def without_sequence_parallel(config: TransformerConfig) -> TransformerConfig:
    """A copy of `config` for layers whose input is not sharded along the sequence."""
    config = copy.copy(config)
    config.sequence_parallel = False
    return config


def _without_megatrons_fusion(config: TransformerConfig) -> TransformerConfig:
    """A copy of `config` for megatron's constructor, which knows no kernel but apex's."""
    config = copy.copy(config)
    config.gradient_accumulation_fusion = False
    return config


def _linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    config: TransformerConfig,
) -> torch.Tensor:
    """torch's own linear; where a kernel is there its weight gradient is added in float32."""
    if not config.gradient_accumulation_fusion:
        return F.linear(x, weight, bias)
    return column_parallel(x, [weight], [bias], _plan_alone())[0]


def _plan_alone() -> LinearPlan:
    """Of products with nothing to say to other ranks."""
    return LinearPlan(None, False, None, "alone", weight_gradient=WeightGradient(fused=True))


def name_linears(model: torch.nn.Module) -> None:
    """Tell every linear of `model` its name, for errors, and connect the ranks they talk to.

    Every process of the world must come to it.
    """
    for name, module in model.named_modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear, JoinedRowParallelLinear)):
            module.layer_name = name
            plan = _overlap_plan(module.config, module.tp_group, name)
            if plan is not None:
                prepare(plan)


def _overlap_plan(
    config: TransformerConfig,
    group: torch.distributed.ProcessGroup | None,
    layer: str,
    operands: tuple[Operands, ...] = (),
) -> LinearPlan | None:
    """How a layer's collectives are overlapped; None where they are megatron's.

    With FP8 `operands` or fused weight gradients they never are: whole collectives, one after the
    other, are ours as well.
    """
    settings: OverlapSettings = config.overlap
    fused = config.gradient_accumulation_fusion
    if platform.group_size(group) == 1 or (settings.mode == "off" and not operands and not fused):
        return None
    weight_gradient = WeightGradient(fused=fused)
    return LinearPlan(
        group,
        config.sequence_parallel,
        settings.flash,
        layer,
        weight_gradient=weight_gradient,
        calibration=settings.calibration if settings.mode == "auto" else None,
        operands=operands,
    )


def _adapted(
    out: torch.Tensor, adapter: torch.nn.Module | None, *inputs: torch.Tensor
) -> torch.Tensor:
    """A layer's output with what its adapter adds to it."""
    return out if adapter is None or not adapter.enabled else adapter(out, *inputs)


def _operands(*fp8: Operands | None) -> tuple[Operands, ...]:
    """The FP8 operands of all weights, or of none."""
    return () if fp8[0] is None else fp8


class ColumnParallelLinear(tensor_parallel.ColumnParallelLinear):
    """Output features sharded over the tensor-parallel ranks.

    With `takes_all_tokens` the input is whole on every rank although the model is sequence
    parallel; with `reduces_input_grad=False` the caller sums the input's gradient over the ranks.
    With `shares_input` both hold of the product, and `project_together` is given the input.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        config: TransformerConfig,
        takes_all_tokens: bool = False,
        reduces_input_grad: bool = True,
        shares_input: bool = False,
    ) -> None:
        # Otherwise a vector a sample, or the text.
        takes_tokens = not takes_all_tokens
        takes_all_tokens |= shares_input
        reduces_input_grad &= not shares_input
        own_config = without_sequence_parallel(config) if takes_all_tokens else config
        super().__init__(
            input_size,
            output_size,
            config=_without_megatrons_fusion(own_config),
            init_method=_leave_uninitialised,
            disable_grad_reduce=not reduces_input_grad,
            tp_group=platform.tp_group(),
        )
        self.config = own_config
        mark_sharded(self.weight, dim=0)
        self.layer_name = type(self).__name__
        self.adapter: torch.nn.Module | None = None
        self.takes_shards = self.sequence_parallel or (shares_input and config.sequence_parallel)
        self.takes_entered = not reduces_input_grad and not shares_input
        self._takes_all_tokens = takes_all_tokens
        self.takes_tokens = takes_tokens
        self.shares_input = shares_input
        self.fp8: Operands | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _adapted(self.multiply(x), self.adapter, x)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """The output without an adapter."""
        if self.fp8 is not None and platform.group_size(self.tp_group) == 1:
            return self.fp8.linear(x, self.weight, self.bias)
        if self.sequence_parallel or self.allreduce_dgrad:
            plan = _overlap_plan(self.config, self.tp_group, self.layer_name, _operands(self.fp8))
            if plan is None:
                return super().forward(x)[0]
            if self._takes_all_tokens:
                # An input that is whole on every rank is a vector a sample: nothing to cut.
                plan = replace(plan, flash=None, calibration=None)
            return column_parallel(x, [self.weight], [self.bias], plan)[0]
        return _linear(x, self.weight, self.bias, self.config)


def project_together(
    x: torch.Tensor, linears: Sequence[ColumnParallelLinear], config: TransformerConfig
) -> Sequence[torch.Tensor]:
    """Each linear's output for the same tokens, which are gathered once and reduced once.

    The linears are made with `shares_input`; `config` is the model's.
    """
    first, operands = linears[0], _operands(*(linear.fp8 for linear in linears))
    plan = _overlap_plan(config, first.tp_group, first.layer_name, operands)
    if plan is None:
        entered = enter_tensor_parallel(x, first.tp_group, config.sequence_parallel)
        outputs = [linear.multiply(entered) for linear in linears]
    else:
        weights, biases = [one.weight for one in linears], [one.bias for one in linears]
        outputs = column_parallel(x, weights, biases, plan)
    return [_adapted(out, linear.adapter, x) for out, linear in zip(outputs, linears)]


class RowParallelLinear(tensor_parallel.RowParallelLinear):
    """Input features sharded over the tensor-parallel ranks; one bias, added after the sum."""

    def __init__(self, input_size: int, output_size: int, config: TransformerConfig) -> None:
        super().__init__(
            input_size,
            output_size,
            config=config,
            init_method=_leave_uninitialised,
            bias=True,
            input_is_parallel=True,
            skip_bias_add=False,
            tp_group=platform.tp_group(),
        )
        mark_sharded(self.weight, dim=1)
        self.layer_name = type(self).__name__
        self.adapter: torch.nn.Module | None = None
        self.fp8: Operands | None = None

    def forward(self, x: torch.Tensor, later: LaterRows | None = None) -> torch.Tensor:
        """With `later` the rows of `x` are filled beside their products."""
        return _adapted(self._multiply(x, later), self.adapter, x)

    def _multiply(self, x: torch.Tensor, later: LaterRows | None) -> torch.Tensor:
        if platform.group_size(self.tp_group) == 1:
            if self.fp8 is not None:
                return self.fp8.linear(x, self.weight, self.bias)
            return _linear(x, self.weight, self.bias, self.config)
        plan = _overlap_plan(self.config, self.tp_group, self.layer_name, _operands(self.fp8))
        if plan is not None:
            return row_parallel([x], [self.weight], self.bias, plan, later)
        partial = F.linear(x, self.weight)
        return reduce_partial_sums(partial, self.tp_group, self.sequence_parallel) + self.bias


class JoinedRowParallelLinear(torch.nn.Module):
    """One row-parallel linear over two inputs side by side, with one reduction and one bias.

    The weight is kept as one parameter per input. As a single matrix its shard would be a selection
    of columns that depends on the tensor-parallel size, and a checkpoint would load wrongly at
    another size without an error.
    """

    def __init__(
        self, attn_size: int, mlp_size: int, output_size: int, config: TransformerConfig
    ) -> None:
        super().__init__()
        self.config = config
        self.layer_name = type(self).__name__
        self.tp_group = platform.tp_group()
        self.sequence_parallel = config.sequence_parallel
        shards, dtype = platform.group_size(self.tp_group), config.params_dtype
        self.attn_weight = torch.nn.Parameter(
            torch.empty(output_size, attn_size // shards, dtype=dtype)
        )
        self.mlp_weight = torch.nn.Parameter(
            torch.empty(output_size, mlp_size // shards, dtype=dtype)
        )
        self.bias = torch.nn.Parameter(torch.empty(output_size, dtype=dtype))
        mark_sharded(self.attn_weight, dim=1)
        mark_sharded(self.mlp_weight, dim=1)
        self.bias.sequence_parallel = self.sequence_parallel
        self.adapter: torch.nn.Module | None = None
        self.fp8: Operands | None = None
        self.fp8_mlp: Operands | None = None

    def forward(
        self, attn: torch.Tensor, mlp: torch.Tensor, later: LaterRows | None = None
    ) -> torch.Tensor:
        """With `later` the rows of `attn` are filled beside their products."""
        return _adapted(self._multiply(attn, mlp, later), self.adapter, attn, mlp)

    def _multiply(
        self, attn: torch.Tensor, mlp: torch.Tensor, later: LaterRows | None
    ) -> torch.Tensor:
        alone = platform.group_size(self.tp_group) == 1
        if alone and self.fp8 is not None:
            partial = self.fp8.linear(attn, self.attn_weight, self.bias)
            return partial + self.fp8_mlp.linear(mlp, self.mlp_weight, None)
        operands = _operands(self.fp8, self.fp8_mlp)
        plan = _overlap_plan(self.config, self.tp_group, self.layer_name, operands)
        if alone and self.config.gradient_accumulation_fusion:
            plan = _plan_alone()
        if plan is not None:
            weights = [self.attn_weight, self.mlp_weight]
            return row_parallel([attn, mlp], weights, self.bias, plan, later)
        partial = F.linear(attn, self.attn_weight, self.bias if alone else None)
        partial = torch.addmm(partial.flatten(0, 1), mlp.flatten(0, 1), self.mlp_weight.t())
        partial = partial.view(*attn.shape[:-1], -1)
        if alone:
            return partial
        return reduce_partial_sums(partial, self.tp_group, self.sequence_parallel) + self.bias
