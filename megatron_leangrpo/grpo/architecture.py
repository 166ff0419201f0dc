# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Which transformer a run trains: the architecture of its base or preset, and its weights."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch

from megatron_leangrpo import platform
from megatron_leangrpo.checkpoint.starting import check_architecture, check_tensors, find_weights
from megatron_leangrpo.checkpoint.training import load_weights
from megatron_leangrpo.config import RunConfig
from megatron_leangrpo.grpo.assets import resolve_asset
from megatron_leangrpo.models.common.config import TransformerSettings
from megatron_leangrpo.models.common.weights import (
    Rule,
    check_names,
    full_tensors,
    gradient_of,
    initialise,
    load_full_tensors,
    shard_dim,
    unwrapped,
)
from megatron_leangrpo.models.families import ModelFamily, find_preset, model_family
from megatron_leangrpo.models.loading import load_transformer_folder, read_transformer_config
from megatron_leangrpo.overlap.settings import OverlapSettings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class Architecture:
    """A checked model configuration and where its weights come from."""

    family: ModelFamily
    config: TransformerSettings
    """The family's configuration."""
    base: Path | None
    """Pipeline folder; None for random weights."""
    guidance_scale: float | None
    """None for a model that takes no guidance."""
    seed: int
    weights: Path | None = None
    """Checkpoint whose weights replace those of the base."""

    def build_model(self, device: torch.device) -> torch.nn.Module:
        """Build this rank's share of the transformer and fill it with weights (a collective).

        They are those of `weights`, or the base's, or random: these depend on the seed alone, so
        that every layout starts from the same model.
        """
        with torch.device(device):
            model = self.family.build(self.config)
        if self.weights is not None:
            self.check_weights()
            load_weights(self.weights, model, average=False)
        elif self.base is None:
            initialise(model, self.weight_rules, self.seed)
        else:
            load_full_tensors(model, self.weight_rules, self._tensors())
        return model

    def export_gradients(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Full gradients under diffusers' names, on every rank (a collective)."""
        return full_tensors(unwrapped(model), self.weight_rules, gradient_of)

    def check_weights(self) -> None:
        """Raise ``ValueError`` where the stored tensors are not those of the model, by name."""
        if self.weights is not None:
            check_tensors(self.weights, self.on_meta)
        elif self.base is not None:
            check_names(self.on_meta, self.weight_rules, self._tensors())

    @cached_property
    def on_meta(self) -> torch.nn.Module:
        """A rank's share without memory, of the layout this process is in: alone, all of it."""
        with torch.device("meta"):
            layout = {
                "tensor_model_parallel_size": platform.tp_size(),
                "context_parallel_size": platform.group_size(platform.cp_group()),
            }
            return self.family.build(replace(self.config, **layout))

    def count_parameters(self, tensor_parallel: int = 1) -> int:
        """Parameters of one of `tensor_parallel` ranks; of the whole transformer for 1."""
        return sum(
            p.numel() if shard_dim(p) is None else p.numel() * platform.tp_size() // tensor_parallel
            for p in self.on_meta.parameters()
        )

    @property
    def weight_rules(self) -> Sequence[Rule]:
        """The table of the model's weights."""
        return self.family.weight_rules(self.config)

    def _tensors(self) -> Mapping[str, torch.Tensor]:
        return load_transformer_folder(self.base / "transformer", self.family.class_name)[1]


def resolve_architecture(config: RunConfig, needs_weights: bool = True) -> Architecture:
    """Find the base, read its architecture and look for its weight files; reads no weights.

    Without `needs_weights` a preset stands in for a base that is not on this machine.
    """
    model, parallel = config.model, config.parallel
    family = model_family(model.family)
    overrides = {
        "params_dtype": DTYPES[model.dtype],
        "recompute_granularity": model.recompute_granularity,
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "context_parallel_size": parallel.context_parallel_size,
        "sequence_parallel": parallel.sequence_parallel,
        "overlap": OverlapSettings(**asdict(config.overlap)),
    }
    preset = None if model.preset is None else find_preset(family, model.preset)
    base = None if model.base is None else resolve_asset(model.base)
    if model.base is not None and base is None and (needs_weights or preset is None):
        raise ValueError(
            f"model.base = {model.base!r}: no such folder; give the path of a diffusers pipeline "
            "folder (with transformer/, vae/, text_encoder/ ...) or the name of an embedded base "
            "(flux_digits, flux_shapes)"
        )
    weights = None if model.weights is None else find_weights(model.weights)
    if base is not None:
        folder = base / "transformer"
        if weights is None:
            published, _ = load_transformer_folder(folder, family.class_name)
        else:
            published = read_transformer_config(folder, family.class_name)
        architecture = family.from_diffusers_config(published, **overrides)
    elif preset is not None:
        architecture = preset(**overrides)
    else:
        raise ValueError("model.base is not set; give a diffusers pipeline folder")
    if weights is not None:
        from_config = partial(family.from_diffusers_config, **overrides)
        check_architecture(weights, architecture, family.class_name, from_config)
    guidance = model.guidance_scale if architecture.guidance_embeds else None
    return Architecture(family, architecture, base, guidance, config.seed, weights)
