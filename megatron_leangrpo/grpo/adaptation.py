# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The low-rank adapters of a run: which projections have one, and the numbers they start from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_leangrpo.config import LoraConfig
from megatron_leangrpo.models.common.config import TransformerSettings
from megatron_leangrpo.models.common.lora_targets import (
    A,
    B,
    LowRank,
    match_targets,
    target_names,
)
from megatron_leangrpo.models.common.weights import (
    Rule,
    full_shapes,
    is_part,
    load_full_tensors,
)
from megatron_leangrpo.models.experts import transformers_of
from megatron_leangrpo.models.lora_files import Names, read_lora

PUBLISHED_ALPHA = 2
"""Alpha over rank in Flow-GRPO's and DanceGRPO's recipes."""


@dataclass(frozen=True)
class Adaptation:
    """Adapters by diffusers' name of the projection."""

    projections: dict[str, LowRank]
    start: Mapping[str, torch.Tensor] | None
    """The tensors of `lora.path`; None starts from the base."""
    num_parameters: int
    """Of all adapters, unsharded."""

    def attach(self, model: torch.nn.Module, weight_rules: Sequence[Rule], seed: int) -> None:
        """Freeze the model and give it the adapters."""
        from megatron_leangrpo.models.common.lora import (
            adapter_rules,
            attach_adapters,
            initialise_adapters,
        )

        attach_adapters(model, weight_rules, self.projections)
        if self.start is None:
            initialise_adapters(model, seed)
            return
        rules, start = adapter_rules(model), self.start
        if is_part(model):
            # Names of the whole model have been compared with the file's when it was opened.
            start = {name: start[name] for rule in rules for name in rule.theirs}
        load_full_tensors(model, rules, start, "lora.path")


def is_adapted(lora: LoraConfig) -> bool:
    """Whether a run trains adapters rather than all weights."""
    return lora.rank > 0 or lora.path is not None


def find_adaptation(
    lora: LoraConfig,
    targets: Sequence[str],
    model: torch.nn.Module,
    weight_rules: Sequence[Rule],
    original_rules: Sequence[Rule],
) -> Adaptation:
    """What the settings mean for a model, of which this needs no numbers.

    `targets` are the family's own. ``ValueError`` for what cannot be.
    """
    names = Names.of(model, weight_rules, original_rules)
    start = None
    if lora.path is not None:
        file = read_lora(lora.path, names)
        projections, start = file.projections, file.tensors
    else:
        if not (lora.targets or targets):
            raise ValueError(
                "lora.targets is empty, and no recipe for this model is known; valid: ends of "
                f"{', '.join(target_names(names.known))}"
            )
        chosen = match_targets(lora.targets or targets, names.known)
        alpha = PUBLISHED_ALPHA * lora.rank if lora.alpha is None else lora.alpha
        projections = dict.fromkeys(chosen, LowRank(lora.rank, alpha))
    shapes = full_shapes(model, weight_rules)
    total = 0
    for name, low in projections.items():
        rows, columns = shapes[f"{name}.weight"]
        if start is not None:
            _check_shape(start, f"{name}.{A}", (low.rank, columns))
            _check_shape(start, f"{name}.{B}", (rows, low.rank))
        total += low.rank * (rows + columns)
    return Adaptation(projections, start, total)


def check_stages_adapted(whole: torch.nn.Module, settings: TransformerSettings) -> None:
    """Raise ``ValueError`` where a pipeline stage of an adapted model would train nothing."""
    from megatron_leangrpo.models.common.lora import has_adapters

    stages = settings.pipeline_model_parallel_size
    for transformer in transformers_of(whole):
        for number in range(stages):
            blocks = settings.stage(number).blocks
            if not any(has_adapters(transformer.numbered_blocks[n]) for n in blocks):
                raise ValueError(
                    f"lora: no projection of blocks {blocks[0]} to {blocks[-1]} is adapted, which "
                    f"are stage {number + 1} of parallel.pipeline_model_parallel_size = {stages} "
                    "and would train nothing; adapt more (lora.targets), or use fewer stages or "
                    "another parallel.pipeline_split"
                )


def _check_shape(tensors: Mapping[str, torch.Tensor], name: str, shape: tuple[int, int]) -> None:
    if tuple(tensors[name].shape) != shape:
        raise ValueError(
            f"lora.path: tensor {name} has shape {tuple(tensors[name].shape)}; this model needs "
            f"{shape}"
        )


def check_lora(lora: LoraConfig, reference_offload: bool) -> None:
    """Raise ``ValueError`` for settings that contradict each other."""
    given = [
        name
        for name, is_given in (
            ("rank", lora.rank != 0),
            ("alpha", lora.alpha is not None),
            ("targets", bool(lora.targets)),
        )
        if is_given
    ]
    if lora.path is not None and given:
        raise ValueError(
            f"lora.{given[0]} = {getattr(lora, given[0])} beside lora.path: rank, alpha and "
            "targets are those of the file; leave them out"
        )
    if lora.path is None and lora.rank == 0 and given:
        raise ValueError(
            f"lora.{given[0]} = {getattr(lora, given[0])} with lora.rank = 0, which trains all "
            "weights; valid ranks of an adapter: 1 or more, such as 64"
        )
    if lora.alpha is not None and not 0 < lora.alpha < math.inf:
        raise ValueError(f"lora.alpha = {lora.alpha} must be above 0, such as {2 * lora.rank}")
    if is_adapted(lora) and reference_offload:
        raise ValueError(
            "grpo.reference_offload = true: with adapters the reference is the base below them, "
            "and there is no second copy to offload; valid: false"
        )
