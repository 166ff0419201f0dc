# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Which transformer a run trains: the architecture of its base or preset, and its weights."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from megatron_leangrpo import platform
from megatron_leangrpo.checkpoint.starting import check_architecture, check_tensors, find_weights
from megatron_leangrpo.checkpoint.training import load_weights
from megatron_leangrpo.config import LoraConfig, RunConfig
from megatron_leangrpo.grpo.adaptation import (
    Adaptation,
    check_stages_adapted,
    find_adaptation,
    is_adapted,
)
from megatron_leangrpo.grpo.assets import resolve_asset
from megatron_leangrpo.grpo.fp8 import fp8_settings
from megatron_leangrpo.models.common.config import TransformerSettings
from megatron_leangrpo.models.common.weights import (
    Rule,
    check_names,
    full_shape,
    full_tensors,
    gradient_of,
    initialise,
    load_full_tensors,
    shard_dim,
    unwrapped,
)
from megatron_leangrpo.models.experts import (
    Experts,
    InFolders,
    rules_of_experts,
    transformers_of,
)
from megatron_leangrpo.models.families import ModelFamily, find_preset, model_family
from megatron_leangrpo.models.loading import (
    load_transformer_folder,
    read_json,
    read_transformer_config,
)
from megatron_leangrpo.overlap.settings import OverlapSettings
from megatron_leangrpo.pipeline.stages import Stage
from megatron_leangrpo.precision.recipe import Fp8Settings

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
    expert_offload: bool = False
    """Of two experts the idle one's weights may be in host memory."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    fp8: Fp8Settings | None = None

    def build_model(self, device: torch.device) -> torch.nn.Module:
        """Build this rank's share of the transformer and fill it with weights (a collective).

        They are those of `weights`, or the base's, or random: these depend on the seed alone, so
        that every layout starts from the same model.
        """
        with torch.device(device):
            model = self._build(self.config)
        if self.fp8 is not None:
            from megatron_leangrpo.models.common.fp8 import use_fp8

            for transformer in transformers_of(model):
                use_fp8(transformer, self.fp8)
        if self.weights is not None:
            self.check_weights()
            load_weights(self.weights, model, average=False)
        elif self.base is None:
            initialise(model, self.weight_rules, self.seed)
        else:
            load_full_tensors(model, self.weight_rules, self._tensors())
        if self.adaptation is not None:
            self.adaptation.attach(model, self.weight_rules, self.seed)
        return model

    @cached_property
    def adaptation(self) -> Adaptation | None:
        """The adapters that are trained in place of the weights; ``ValueError`` as they say."""
        if not is_adapted(self.lora):
            return None
        original = self.family.original
        found = find_adaptation(
            self.lora,
            self.family.lora_targets,
            self.on_meta,
            self.weight_rules,
            () if original is None else self._of_all(original.weight_rules(self.config)),
        )
        if self.config.pipeline_model_parallel_size > 1:
            check_stages_adapted(self._adapted_on_meta(found), self.config)
        return found

    def trained_rules(self, model: torch.nn.Module) -> Sequence[Rule]:
        """The table of what is trained: all weights, or the adapters under PEFT's names."""
        if self.adaptation is None:
            return self.weight_rules
        from megatron_leangrpo.models.common.lora import adapter_rules

        return adapter_rules(model)

    def export_gradients(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Full gradients under diffusers' names, on every rank (a collective)."""
        return full_tensors(unwrapped(model), self.trained_rules(model), gradient_of)

    def check_weights(self) -> None:
        """Raise ``ValueError`` where the stored tensors are not those of the model, by name."""
        if self.weights is not None:
            check_tensors(self.weights, self.on_meta)
        elif self.base is not None:
            check_names(self.on_meta, self.weight_rules, self._tensors())

    @cached_property
    def on_meta(self) -> torch.nn.Module:
        """A rank's share of all blocks without memory, of the layout this process is in."""
        return self._on_meta(Stage.whole(self.config.num_blocks))

    def adapter_rules(self) -> Sequence[Rule]:
        """The table of the adapters of all pipeline stages."""
        from megatron_leangrpo.models.common.lora import adapter_rules

        assert self.adaptation is not None
        return adapter_rules(self._adapted_on_meta(self.adaptation))

    def _adapted_on_meta(
        self, adaptation: Adaptation, stage: Stage | None = None
    ) -> torch.nn.Module:
        from megatron_leangrpo.models.common.lora import attach_adapters

        model = self._on_meta(stage or Stage.whole(self.config.num_blocks))
        with torch.device("meta"):
            attach_adapters(model, self.weight_rules, adaptation.projections)
        return model

    def _on_meta(self, stage: Stage) -> torch.nn.Module:
        with torch.device("meta"):
            layout = {
                "tensor_model_parallel_size": platform.tp_size(),
                "context_parallel_size": platform.group_size(platform.cp_group()),
            }
            return self._build(replace(self.config, **layout), stage)

    def _build(self, settings: TransformerSettings, stage: Stage | None = None) -> torch.nn.Module:
        """The policy's model: a transformer, or both experts."""
        transformers = [self.family.build(settings, stage) for _ in settings.transformer_folders]
        if len(transformers) == 1:
            return transformers[0]
        return Experts(*transformers, settings.expert_boundary, self.expert_offload)

    def count_parameters(self) -> int:
        """Parameters of the whole transformer."""
        return sum(math.prod(full_shape(p)) for p in self.on_meta.parameters())

    def rank_parameters(self, tensor_parallel: int) -> tuple[int, int]:
        """Weights of a rank and how many numbers it trains, on the stage that has the most."""
        adaptation, counts = self.adaptation, []
        for number in range(self.config.pipeline_model_parallel_size):
            stage = self.config.stage(number)
            weights = trained = sum(
                math.prod(full_shape(p)) // (1 if shard_dim(p) is None else tensor_parallel)
                for p in self._on_meta(stage).parameters()
            )
            if adaptation is not None:
                adapted = self._adapted_on_meta(adaptation, stage).parameters()
                numbers = sum(math.prod(full_shape(p)) for p in adapted if p.requires_grad)
                trained = -(-numbers // tensor_parallel)
            counts.append((weights, trained))
        return max(counts)

    @property
    def weight_rules(self) -> Sequence[Rule]:
        """The table of the model's weights; experts' are named by their folder of a pipeline."""
        return self._of_all(self.family.weight_rules(self.config))

    def _of_all(self, rules: Sequence[Rule]) -> Sequence[Rule]:
        folders = self.config.transformer_folders
        return rules if len(folders) == 1 else rules_of_experts(rules, folders)

    def _tensors(self) -> Mapping[str, torch.Tensor]:
        found = {
            folder: load_transformer_folder(self.base / folder, self.family.class_name)[1]
            for folder in self.config.transformer_folders
        }
        return found["transformer"] if len(found) == 1 else InFolders(found)


def resolve_architecture(config: RunConfig, needs_weights: bool = True) -> Architecture:
    """Find the base, read its architecture and look for its weight files; reads no weights.

    Without `needs_weights` a preset stands in for a base that is not on this machine.
    """
    model, parallel = config.model, config.parallel
    family, split = model_family(model.family), parallel.pipeline_split
    overrides = {
        "params_dtype": DTYPES[model.dtype],
        "recompute_granularity": model.recompute_granularity,
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "context_parallel_size": parallel.context_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "pipeline_split": tuple(split) if isinstance(split, list) else split,
        "sequence_parallel": parallel.sequence_parallel,
        "overlap": OverlapSettings(**asdict(config.overlap)),
    }
    if model.expert_boundary is not None:
        overrides["expert_boundary"] = model.expert_boundary
    preset = None if model.preset is None else find_preset(family, model.preset)
    base = None if model.base is None else resolve_asset(model.base)
    if model.base is not None and base is None and (needs_weights or preset is None):
        raise ValueError(
            f"model.base = {model.base!r}: no such folder; give the path of a diffusers pipeline "
            "folder (with transformer/, vae/, text_encoder/ ...) or the name of an embedded base "
            "(flux_digits, flux_shapes, wan_motion)"
        )
    weights = None if model.weights is None else find_weights(model.weights)
    if base is not None:
        overrides = {**_read_index(family, base), **overrides}
        architecture = _read_transformers(family, base, overrides, needs_files=weights is None)
        if preset is not None and preset().experts > architecture.experts:
            raise ValueError(
                f"model.base: {base} has one transformer and model.preset = {model.preset} two; "
                "needed is a folder transformer_2, and its name in model_index.json"
            )
    elif preset is not None:
        architecture = preset(**overrides)
    else:
        raise ValueError("model.base is not set; give a diffusers pipeline folder")
    if weights is not None:
        # How many there are is said by the pipeline or the preset, not by their config.json.
        experts = {
            "experts": architecture.experts,
            "expert_boundary": architecture.expert_boundary,
        }
        from_config = partial(family.from_diffusers_config, **{**overrides, **experts})
        check_architecture(weights, architecture, family.class_name, from_config)
    guidance = model.guidance_scale if architecture.guidance_embeds else None
    _check_expert_settings(config, architecture)
    return Architecture(
        family,
        architecture,
        base,
        guidance,
        config.seed,
        weights,
        model.expert_offload,
        config.lora,
        fp8_settings(config, needs_backend=needs_weights),
    )


def _check_expert_settings(config: RunConfig, settings: TransformerSettings) -> None:
    """Raise ``ValueError`` for settings of a second transformer where there is one only."""
    given = {
        "sampling.cfg_scale_2": config.sampling.cfg_scale_2,
        "model.expert_offload": config.model.expert_offload or None,
    }
    for key, value in given.items():
        if settings.experts == 1 and value is not None:
            raise ValueError(
                f"{key} = {value}: this model has one transformer; leave it unset (two has "
                "Wan 2.2 A14B)"
            )


def _read_index(family: ModelFamily, base: Path) -> dict[str, Any]:
    """What a pipeline's `model_index.json` says of the model; it may be absent."""
    path = base / "model_index.json"
    return family.pipeline_fields(read_json(path)) if path.is_file() else {}


def _read_transformers(
    family: ModelFamily, base: Path, overrides: Mapping[str, Any], needs_files: bool
) -> TransformerSettings:
    """The configuration in a pipeline's transformer folders, the same in both where there are two.

    With `needs_files` their weight files must be there and whole.
    """

    def read(folder: str) -> TransformerSettings:
        if needs_files:
            published, _ = load_transformer_folder(base / folder, family.class_name)
        else:
            published = read_transformer_config(base / folder, family.class_name)
        return family.from_diffusers_config(published, **overrides)

    first = read("transformer")
    for folder in first.transformer_folders[1:]:
        if read(folder) != first:
            raise ValueError(
                f"model.base: {base / folder} and {base / 'transformer'} differ in their "
                "config.json; two experts have one architecture"
            )
    return first
