# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters of the parallel linears: `y = W x + b + alpha / rank * B A x`, W and b frozen.

An adapter belongs to a projection under diffusers' name, as in PEFT; a fused linear (q, k and v)
holds one for each of its projections. Only the `rank` features of `A x` travel between ranks.
A and B are float32 or wider and multiply in the activations' dtype: float32 masters under
autocast, as Flow-GRPO and DanceGRPO train them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch.nn import Parameter, ParameterList

from megatron_leangrpo.models.common.linear import (
    ColumnParallelLinear,
    JoinedRowParallelLinear,
    RowParallelLinear,
    mark_sharded,
)
from megatron_leangrpo.models.common.lora_targets import A, B, LowRank, check_projections
from megatron_leangrpo.models.common.weights import (
    NamedDraws,
    Rule,
    full_shapes,
    is_part,
    load_full_tensors,
    same,
    unwrapped,
)
from megatron_leangrpo.parallel.mappings import (
    copy_to_tensor_parallel,
    enter_tensor_parallel,
    reduce_partial_sums,
)

ParallelLinear = ColumnParallelLinear | RowParallelLinear | JoinedRowParallelLinear


class Adapter(torch.nn.Module):
    """The adapters of one linear's projections, which `projections` names as diffusers does."""

    def __init__(self, projections: Mapping[str, LowRank], layer: ParallelLinear) -> None:
        super().__init__()
        self.projections = dict(projections)
        self.enabled = True
        self.group = layer.tp_group

    def weight_changes(self) -> Sequence[torch.Tensor]:
        """What merging adds to this rank's share of each weight of the layer."""
        raise NotImplementedError

    def rules(self, name: str) -> list[Rule]:
        """The parameters of this adapter, called `name`, and PEFT's tensors."""
        raise NotImplementedError


class ColumnAdapter(Adapter):
    """A is replicated and sees the tokens the layer is given; B is sharded like the layer's rows.

    `rule` joins the projections' rows, so that one product with B gives the fused output.
    """

    def __init__(
        self, layer: ColumnParallelLinear, rule: Rule, projections: Mapping[str, LowRank]
    ) -> None:
        super().__init__(projections, layer)
        self.rule, self.weight_names = rule, [_module(name) for name in rule.theirs]
        self.takes_shards, self.takes_entered = layer.takes_shards, layer.takes_entered
        self.rows = [len(part) for part in rule.to_theirs((layer.weight.detach(),))]
        inputs, self.lora_A, self.lora_B = layer.weight.shape[1], ParameterList(), ParameterList()
        for module, rows in zip(self.weight_names, self.rows):
            if module in projections:
                rank = projections[module].rank
                self.lora_A.append(_parameter((rank, inputs), layer.weight))
                self.lora_B.append(_parameter((rows, rank), layer.weight))
                self.lora_A[-1].sequence_parallel = self.takes_shards
                mark_sharded(self.lora_B[-1], dim=0)

    def down(self) -> torch.Tensor:
        """The A of all projections, one below the other."""
        return torch.cat(tuple(self.lora_A))

    def up(self) -> torch.Tensor:
        """Scaled B with the layer's rows; each row has zeros where other projections have ranks."""
        width = sum(a.shape[0] for a in self.lora_A)
        blocks, start, own = [], 0, iter(self.lora_B)
        for module, rows in zip(self.weight_names, self.rows):
            low = self.projections.get(module)
            if low is None:
                blocks.append(self.lora_B[0].new_zeros(rows, width))
                continue
            columns = (start, width - start - low.rank)
            blocks.append(F.pad(low.scale * next(own), columns))
            start += low.rank
        return self.rule.to_ours(tuple(blocks))[0]

    def forward(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        down, up = self.down().to(x.dtype), self.up().to(x.dtype)
        if self.takes_entered:
            # The gradients of A and x are sums over ranks: ours here, that of x by the caller.
            inner = F.linear(x, copy_to_tensor_parallel(down, self.group))
        else:
            inner = enter_tensor_parallel(F.linear(x, down), self.group, self.takes_shards)
        return _add_product(out, inner, up)

    def weight_changes(self) -> Sequence[torch.Tensor]:
        """See `Adapter`."""
        return [self.up() @ self.down()]

    def rules(self, name: str) -> list[Rule]:
        """See `Adapter`."""
        modules = [module for module in self.weight_names if module in self.projections]
        return [
            same(f"{name}.lora_{letter}.{n}", f"{module}.lora_{letter}.weight")
            for n, module in enumerate(modules)
            for letter in "AB"
        ]


class RowAdapter(Adapter):
    """A is sharded like the layer's columns, one part for each input; B sees the tokens that stay.

    `rule` joins the parts of A as it joins those of the weight.
    """

    def __init__(
        self,
        layer: RowParallelLinear | JoinedRowParallelLinear,
        rule: Rule,
        projections: Mapping[str, LowRank],
    ) -> None:
        super().__init__(projections, layer)
        self.rule, self.sequence_parallel = rule, layer.sequence_parallel
        [(self.module, self.low)] = projections.items()
        weights = weights_of(layer)
        self.lora_A = ParameterList(_parameter((self.low.rank, w.shape[1]), w) for w in weights)
        self.lora_B = _parameter((len(weights[0]), self.low.rank), weights[0])
        for a in self.lora_A:
            mark_sharded(a, dim=1)
        self.lora_B.sequence_parallel = self.sequence_parallel

    def forward(self, out: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        partial = sum(F.linear(x, a.to(x.dtype)) for x, a in zip(inputs, self.lora_A))
        inner = reduce_partial_sums(partial, self.group, self.sequence_parallel)
        return _add_product(out, inner, (self.low.scale * self.lora_B).to(inner.dtype))

    def weight_changes(self) -> Sequence[torch.Tensor]:
        """See `Adapter`."""
        return [self.low.scale * self.lora_B @ a for a in self.lora_A]

    def rules(self, name: str) -> list[Rule]:
        """See `Adapter`."""
        parts = tuple(f"{name}.lora_A.{n}" for n in range(len(self.lora_A)))
        whole = Rule(parts, (f"{self.module}.{A}",), self.rule.to_ours, self.rule.to_theirs)
        return [whole, same(f"{name}.lora_B", f"{self.module}.{B}")]


def _add_product(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`out + x @ weight.t()` in one pass over the output."""
    flat = out.reshape(-1, out.shape[-1])
    return torch.addmm(flat, x.reshape(-1, x.shape[-1]), weight.t()).view_as(out)


def _parameter(shape: tuple[int, int], like: torch.Tensor) -> Parameter:
    wide = torch.promote_types(like.dtype, torch.float32)
    return Parameter(torch.empty(shape, dtype=wide, device=like.device))


def _module(weight_name: str) -> str:
    return weight_name.removesuffix(".weight")


def weights_of(layer: ParallelLinear) -> list[Parameter]:
    """The weights of a layer, one for each of its inputs."""
    if isinstance(layer, JoinedRowParallelLinear):
        return [layer.attn_weight, layer.mlp_weight]
    return [layer.weight]


def adapters(model: torch.nn.Module) -> Iterator[tuple[str, Adapter]]:
    """All adapters of a model with their names."""
    for name, module in unwrapped(model).named_modules():
        if isinstance(module, Adapter):
            yield name, module


def adapter_rules(model: torch.nn.Module) -> list[Rule]:
    """The table of all adapters: our parameters and PEFT's tensors."""
    return [rule for name, adapter in adapters(model) for rule in adapter.rules(name)]


def has_adapters(model: torch.nn.Module) -> bool:
    """Whether the model trains adapters rather than its weights."""
    return next(adapters(model), None) is not None


def adaptable(
    model: torch.nn.Module, weight_rules: Sequence[Rule]
) -> dict[str, tuple[ParallelLinear, Rule]]:
    """The projections that can have an adapter, by diffusers' names: those of all blocks."""
    names = {
        id(weight): name
        for name, weight in model.named_parameters()
        if name.endswith(("weight", "_weight"))
    }
    rule_of = {name: rule for rule in weight_rules for name in rule.ours}
    found = {}
    for layer in model.modules():
        if isinstance(layer, ParallelLinear):
            rule = rule_of[names[id(weights_of(layer)[0])]]
            found.update((_module(name), (layer, rule)) for name in rule.theirs)
    return found


def attach_adapters(
    model: torch.nn.Module, weight_rules: Sequence[Rule], projections: Mapping[str, LowRank]
) -> None:
    """Freeze `model` and give the named projections adapters, whose numbers are unset.

    ``ValueError`` where a projection is not there; other stages of a pipeline may have it.
    """
    known = adaptable(model, weight_rules)
    if is_part(model):
        projections = {name: low for name, low in projections.items() if name in known}
    check_projections(projections, known)
    model.requires_grad_(False)
    of_layer: dict[int, dict[str, LowRank]] = {}
    for module, low in projections.items():
        of_layer.setdefault(id(known[module][0]), {})[module] = low
    for layer, rule in known.values():
        own = of_layer.pop(id(layer), None)
        if own is not None:
            kind = ColumnAdapter if isinstance(layer, ColumnParallelLinear) else RowAdapter
            layer.adapter = kind(layer, rule, own)


def initialise_adapters(model: torch.nn.Module, seed: int) -> None:
    """A normal with standard deviation 1 / rank (PEFT's gaussian), B zero; equal in every layout.

    The adapted model is the base until B has been trained.
    """
    rules = adapter_rules(model)

    def draw(name: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        if name.endswith(B):
            return tensor.zero_()
        return tensor.normal_(std=1 / len(tensor), generator=generator)

    load_full_tensors(model, rules, NamedDraws(full_shapes(model, rules), seed, draw))


@contextmanager
def adapters_off(model: torch.nn.Module) -> Iterator[None]:
    """Let the model be its base for the forwards inside."""
    switched = [adapter for _, adapter in adapters(model) if adapter.enabled]
    for adapter in switched:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in switched:
            adapter.enabled = True


@contextmanager
def merged(model: torch.nn.Module) -> Iterator[None]:
    """Put `W + alpha / rank * B A`, rounded to W's dtype, in the place of W and the adapters.

    Afterwards W has the bits it had: they are kept, not computed back.
    """
    layers = [m for m in unwrapped(model).modules() if isinstance(m, ParallelLinear) and m.adapter]
    pairs = [(w, d) for m in layers for w, d in zip(weights_of(m), m.adapter.weight_changes())]
    kept = [weight.detach().clone() for weight, _ in pairs]
    with torch.no_grad(), adapters_off(model):
        try:
            for weight, change in pairs:
                weight.copy_(weight.to(change.dtype) + change)
            yield
        finally:
            for (weight, _), bits in zip(pairs, kept):
                weight.copy_(bits)
