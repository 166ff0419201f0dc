# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Moves weights and gradients between sharded parameters and full tensors under diffusers' names.

A `Rule` joins a few of our parameters with a few of diffusers' tensors and knows both directions on
full tensors; how a parameter is sharded is read from the attributes megatron put on it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_leangrpo import platform
from megatron_leangrpo.parallel.stages import of_all_stages

ADAPTER = ".adapter."
"""Inside the names of the parameters that a low-rank adapter has."""
_SHOWN_NAMES = 4

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Rule:
    """Full tensors of our parameters `ours` <-> full tensors of diffusers' `theirs`."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    to_ours: Callable[[Tensors], Tensors]
    to_theirs: Callable[[Tensors], Tensors]


def same(ours: str, theirs: str) -> Rule:
    """The same tensor under two names."""
    return Rule((ours,), (theirs,), lambda tensors: tensors, lambda tensors: tensors)


def concatenated(ours: tuple[str, ...], theirs: str, sizes: tuple[int, ...], dim: int) -> Rule:
    """Several of our tensors are one of theirs, side by side along `dim`."""
    return Rule(
        ours,
        (theirs,),
        lambda tensors: tensors[0].split(sizes, dim),
        lambda tensors: (torch.cat(tensors, dim),),
    )


def heads_interleaved(ours: str, theirs: tuple[str, ...], head_dim: int) -> Rule:
    """Several projections of theirs are one of ours, row blocks alternating head by head.

    A rank's heads are then one contiguous block of rows at every tensor-parallel size.
    """

    def to_ours(tensors: Tensors) -> Tensors:
        by_head = [x.unflatten(0, (-1, head_dim)) for x in tensors]
        return (torch.stack(by_head, dim=1).flatten(0, 2),)

    def to_theirs(tensors: Tensors) -> Tensors:
        by_head = tensors[0].unflatten(0, (-1, len(theirs), head_dim))
        return tuple(by_head[:, n].flatten(0, 1) for n in range(len(theirs)))

    return Rule((ours,), theirs, to_ours, to_theirs)


def load_full_tensors(
    model: torch.nn.Module,
    rules: Sequence[Rule],
    tensors: Mapping[str, torch.Tensor],
    setting: str = "model.base",
) -> None:
    """Fill `model` from full tensors under diffusers' names, reading each tensor once.

    Raises ValueError for missing or unknown tensors before any weight changes, and for a misshapen
    one when it is read.
    """
    parameters, own = _own_parameters(model, rules)
    shapes = check_names(model, rules, tensors, setting)
    with torch.no_grad():
        for rule in own:
            theirs = tuple(tensors[name] for name in rule.theirs)
            for name, tensor in zip(rule.theirs, theirs):
                if tensor.shape != shapes[name]:
                    raise ValueError(
                        f"{setting}: tensor {name} has shape {tuple(tensor.shape)}; needed is "
                        f"{tuple(shapes[name])}"
                    )
            for name, full in zip(rule.ours, rule.to_ours(theirs)):
                parameter = parameters[name]
                parameter.copy_(_own_shard(full, parameter))


def check_names(
    model: torch.nn.Module,
    rules: Sequence[Rule],
    tensors: Mapping[str, torch.Tensor],
    setting: str = "model.base",
) -> dict[str, torch.Size]:
    """The shapes that full tensors of this stage must have.

    ValueError for missing or unknown ones of the whole model.
    """
    names = {name for rule in rules for name in rule.theirs}
    _refuse(setting, "misses", sorted(names - set(tensors)))
    _refuse(setting, "has unknown", sorted(set(tensors) - names))
    return full_shapes(model, rules)


def initialise(model: torch.nn.Module, rules: Sequence[Rule], seed: int) -> None:
    """Random weights, the same in every layout."""
    shapes = dict.fromkeys(name for rule in rules for name in rule.theirs)
    shapes.update(full_shapes(model, rules))
    load_full_tensors(model, rules, random_weights(shapes, seed))


def random_weights(shapes: Mapping[str, torch.Size], seed: int) -> NamedDraws:
    """Weights as torch initialises linears and convolutions.

    Norms start as the identity; a table, which is no weight and no bias, is normal with variance
    1 / width.
    """

    def draw(name: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        if not name.endswith(("weight", "bias")):
            return tensor.normal_(std=tensor.shape[-1] ** -0.5, generator=generator)
        weight_shape = shapes[name.removesuffix("bias").removesuffix("weight") + "weight"]
        if len(weight_shape) == 1:
            return tensor.fill_(1.0 if name.endswith("weight") else 0.0)
        bound = math.prod(weight_shape[1:]) ** -0.5
        return tensor.uniform_(-bound, bound, generator=generator)

    return NamedDraws(shapes, seed, draw)


def full_tensors(
    model: torch.nn.Module,
    rules: Sequence[Rule],
    read: Callable[[torch.nn.Parameter], torch.Tensor] = lambda parameter: parameter.detach(),
) -> dict[str, torch.Tensor]:
    """Full tensors under diffusers' names, gathered over tensor-parallel ranks and stages.

    Collective; every rank gets all of them. `read` picks what is exported of a parameter, a tensor
    shaped like it. The tensors share no memory with the model.
    """
    parameters, own = _own_parameters(model, rules)
    exported = {}
    for rule in own:
        full = tuple(_gather(read(parameters[n]), parameters[n]) for n in rule.ours)
        for name, tensor in zip(rule.theirs, rule.to_theirs(full)):
            exported[name] = tensor.clone(memory_format=torch.contiguous_format)
    return of_all_stages(exported) if is_part(model) else exported


def full_shapes(model: torch.nn.Module, rules: Sequence[Rule]) -> dict[str, torch.Size]:
    """The shapes of this stage's full tensors under diffusers' names; nothing is allocated."""
    parameters, own = _own_parameters(model, rules)
    shapes = {}
    for rule in own:
        tensors = rule.to_theirs(tuple(_full_meta(parameters[name]) for name in rule.ours))
        shapes.update((name, tensor.shape) for name, tensor in zip(rule.theirs, tensors))
    return shapes


Draw = Callable[[str, torch.Tensor, torch.Generator], torch.Tensor]


class NamedDraws(Mapping[str, torch.Tensor]):
    """Tensors that `draw` fills when they are read.

    Each has a generator of its own, seeded by (seed, name).
    """

    def __init__(self, shapes: Mapping[str, torch.Size], seed: int, draw: Draw) -> None:
        self._shapes, self._seed, self._draw = shapes, seed, draw

    def __getitem__(self, name: str) -> torch.Tensor:
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return self._draw(name, torch.empty(self._shapes[name], device="cpu"), generator)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside megatron's data-parallel wrapper."""
    while hasattr(model, "module"):
        model = model.module
    return model


def gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The gradient of a parameter: megatron's buffer, torch's, or zeros if there is none."""
    gradient = getattr(parameter, "main_grad", None)
    if gradient is None:
        gradient = parameter.grad
    return torch.zeros_like(parameter) if gradient is None else gradient.detach()


def sharded_parameters(model: torch.nn.Module) -> dict[str, Any]:
    """What is trained, for megatron's distributed checkpoints, which load at any parallel size.

    megatron's own walk over the modules takes whatever is in a ModuleList for replicated.
    """
    from megatron.core.utils import (
        make_sharded_tensor_for_checkpoint,
        make_tp_sharded_tensor_for_checkpoint,
    )

    groups = {"tp_group": platform.tp_group(), "dp_cp_group": platform.dp_cp_group()}
    sharded = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        dim = shard_dim(parameter)
        if dim is None:
            sharded[name] = make_sharded_tensor_for_checkpoint(parameter, name, **groups)
        else:
            sharded[name] = make_tp_sharded_tensor_for_checkpoint(parameter, name, dim, **groups)
    return sharded


def is_part(model: torch.nn.Module) -> bool:
    """Whether a model is one of several pipeline stages."""
    stage = getattr(model, "stage", None)
    return stage is not None and stage.stages > 1


def _own_parameters(
    model: torch.nn.Module, rules: Sequence[Rule]
) -> tuple[dict[str, torch.nn.Parameter], Sequence[Rule]]:
    """The parameters by name, of which `rules` must hold all weights or all adapters.

    With them the rules of the parameters that are here: all of them but in a pipeline.
    """
    parameters = dict(model.named_parameters())
    if is_part(model):
        rules = [rule for rule in rules if not parameters.keys().isdisjoint(rule.ours)]
    mapped = [name for rule in rules for name in rule.ours]
    adapted = {name for name in parameters if ADAPTER in name}
    expected = adapted if adapted.intersection(mapped) else parameters.keys() - adapted
    assert len(set(mapped)) == len(mapped) and set(mapped) == expected, set(mapped) ^ expected
    return parameters, rules


def _refuse(setting: str, what: str, names: list[str]) -> None:
    if names:
        shown = ", ".join(names[:_SHOWN_NAMES])
        more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
        tensors = "tensor" if len(names) == 1 else "tensors"
        raise ValueError(f"{setting}: the weight file {what} {len(names)} {tensors}: {shown}{more}")


def shard_dim(parameter: torch.nn.Parameter) -> int | None:
    """The dimension along which a parameter is cut over tensor-parallel ranks, or None."""
    return parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None


def full_shape(parameter: torch.nn.Parameter) -> tuple[int, ...]:
    """The parameter's unsharded shape."""
    shape, dim = list(parameter.shape), shard_dim(parameter)
    if dim is not None:
        shape[dim] *= platform.tp_size()
    return tuple(shape)


def _full_meta(parameter: torch.nn.Parameter) -> torch.Tensor:
    """A tensor without data that has the parameter's unsharded shape."""
    return torch.empty(full_shape(parameter), device="meta")


def _own_shard(full: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
    dim = shard_dim(parameter)
    return full if dim is None else full.chunk(platform.tp_size(), dim)[platform.tp_rank()]


def _gather(shard: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
    dim = shard_dim(parameter)
    if dim is None or platform.tp_size() == 1:
        return shard
    shards = [torch.empty_like(shard) for _ in range(platform.tp_size())]
    dist.all_gather(shards, shard.contiguous(), group=platform.tp_group())
    return torch.cat(shards, dim)
