# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""A checkpoint of any format as full tensors under our names and under diffusers'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import torch

from checkpoints_tools.inputs import FOLDERS, ExpertsInput, SafetensorsInput, find_input
from checkpoints_tools.naming import listed, without_wrappers
from checkpoints_tools.runs import run_transformer
from megatron_leangrpo.checkpoint.store import damage
from megatron_leangrpo.checkpoint.stored import StoredTensors
from megatron_leangrpo.models.common.config import TransformerSettings
from megatron_leangrpo.models.common.conversion import Converted, TensorInfo, TensorSource
from megatron_leangrpo.models.common.weights import Rule, full_shapes, shard_dim
from megatron_leangrpo.models.experts import NAMES, InFolders, of_one, rules_of_experts
from megatron_leangrpo.models.families import ModelFamily, family_names, model_family
from megatron_leangrpo.models.loading import (
    CONFIG,
    WeightFiles,
    check_guidance,
    read_json,
    without_unused,
)
from megatron_leangrpo.models.saving import DTYPE_NAMES
from megatron_leangrpo.pipeline.stages import Stage


@dataclass(frozen=True)
class Checkpoint:
    """The weights of a transformer, or of two experts, checked against their architecture."""

    path: Path
    format: str
    """diffusers, original (the authors' files), or megatron."""
    family_name: str
    config: dict[str, Any]
    """Diffusers' `config.json`."""
    tensors: TensorSource
    """As stored, without what other programs put before the names."""
    step: int | None = None
    """Finished iterations of a run's checkpoint."""
    notes: list[str] = field(default_factory=list)
    folders: Sequence[str] = FOLDERS[:1]
    """Of the transformers in a pipeline; two for experts, whose tensors have an expert's name
    before ours, and that of its folder before the others."""

    @property
    def family(self) -> ModelFamily:
        """The model family."""
        return model_family(self.family_name)

    @cached_property
    def settings(self) -> TransformerSettings:
        """The architecture of a transformer; weights in the widest dtype that is stored."""
        stored = {info.dtype for info in self.tensors.layout.values()} & set(DTYPE_NAMES)
        dtype = reduce(torch.promote_types, stored) if stored else torch.float32
        return self.family.from_diffusers_config(self.config, params_dtype=dtype)

    @property
    def one_architecture(self) -> TransformerSettings:
        """The architecture whatever the dtype."""
        return self.family.from_diffusers_config(self.config)

    @cached_property
    def model(self) -> torch.nn.Module:
        """The whole model without memory: names, shapes, and how each is cut."""
        with torch.device("meta"):
            whole = Stage.whole(self.settings.num_blocks)
            transformers = [self.family.build(self.settings, whole) for _ in self.folders]
        if len(transformers) == 1:
            return transformers[0]
        return torch.nn.ModuleDict(dict(zip(NAMES, transformers, strict=True)))

    @cached_property
    def transformers(self) -> dict[str, Checkpoint]:
        """Each of them by its folder, as if it were alone."""
        if len(self.folders) == 1:
            return {self.folders[0]: self}
        prefixes = NAMES if self.format == "megatron" else self.folders
        return {
            folder: replace(self, tensors=of_one(self.tensors, prefix), folders=(folder,))
            for folder, prefix in zip(self.folders, prefixes, strict=True)
        }

    @property
    def shard_dims(self) -> dict[str, int | None]:
        """The dimension along which tensor parallelism cuts each parameter."""
        return {name: shard_dim(p) for name, p in self.model.named_parameters()}

    @property
    def weight_rules(self) -> Sequence[Rule]:
        """Our names and diffusers'."""
        return self._of_all(self.family.weight_rules(self.settings))

    @property
    def original_rules(self) -> Sequence[Rule]:
        """Our names and the authors'; nothing where their files are not read."""
        original = self.family.original
        return () if original is None else self._of_all(original.weight_rules(self.settings))

    @property
    def stored_rules(self) -> Sequence[Rule]:
        """Our names and those of the file, whose side is diffusers' for a megatron checkpoint."""
        return self.original_rules if self.format == "original" else self.weight_rules

    def _of_all(self, rules: Sequence[Rule]) -> Sequence[Rule]:
        return rules if len(self.folders) == 1 else rules_of_experts(rules, self.folders)

    @cached_property
    def ours(self) -> TensorSource:
        """Full tensors under our names."""
        if self.format == "megatron":
            return self.tensors
        return Converted(self.tensors, self.stored_rules, to_ours=True)

    @cached_property
    def theirs(self) -> TensorSource:
        """Full tensors under diffusers' names."""
        if self.format == "diffusers":
            return self.tensors
        return Converted(self.ours, self.weight_rules, to_ours=False)

    def check(self, setting: str) -> None:
        """Raise ``ValueError`` unless every tensor of the model is there once, and no other."""
        try:
            model = self.model
        except Exception as error:  # Any value can stand in a file, and fail anywhere.
            raise ValueError(f"{setting}: the configuration of {self.path}: {error}") from error
        if self.format == "megatron":
            expected = {n: tuple(p.shape) for n, p in model.named_parameters()}
        else:
            shapes = full_shapes(model, self.stored_rules)
            expected = {name: tuple(shape) for name, shape in shapes.items()}
        layout = self.tensors.layout
        wrong = [
            (f"{len(names)} {what}", names)
            for what, names in (
                ("missing", expected.keys() - layout.keys()),
                ("unknown", layout.keys() - expected.keys()),
            )
            if names
        ]
        misshapen = [
            f"{name} is {layout[name].shape} instead of {shape}"
            for name, shape in expected.items()
            if name in layout and layout[name].shape != shape
        ]
        if misshapen:
            wrong.append((f"{len(misshapen)} misshapen", misshapen))
        narrow = [name for name, info in layout.items() if info.dtype not in DTYPE_NAMES]
        if narrow:
            dtype = str(layout[narrow[0]].dtype).removeprefix("torch.")
            wrong.append((f"{len(narrow)} in {dtype}, not bfloat16, float16 or float32", narrow))
        if wrong:
            parts = "; ".join(f"{what} ({listed(names)})" for what, names in wrong)
            raise ValueError(
                f"{setting}: the tensors of {self.path} are not those of its {self.family_name}: "
                f"{parts}"
            )


def open_checkpoint(
    path: str | Path,
    setting: str,
    family_name: str | None = None,
    average: bool = False,
    verified: bool = True,
) -> Checkpoint:
    """Open a checkpoint of any format and check it; reads no weights except to compare checksums.

    `verified` asks for checksums of a megatron checkpoint. ``ValueError`` for whatever is wrong.
    """
    found = find_input(Path(path), setting)
    if isinstance(found, Path):
        checkpoint = _open_megatron(found, setting, average, verified)
    elif average:
        raise ValueError(f"--average: {path} is no checkpoint of a run and has no average")
    elif isinstance(found, ExpertsInput):
        checkpoint = _open_experts(found, setting)
    else:
        checkpoint = _open_safetensors(found, setting)
    if family_name is not None and checkpoint.family_name != family_name:
        raise ValueError(
            f"--model = {family_name}: {checkpoint.path} is a {checkpoint.family_name}; give "
            f"--model {checkpoint.family_name}"
        )
    checkpoint.check(setting)
    return checkpoint


def _open_safetensors(found: SafetensorsInput, setting: str) -> Checkpoint:
    tensors, notes = without_wrappers(WeightFiles(found.weights, setting, wrappers=()))
    family_name = _family_of(tensors.layout, found, setting)
    family = model_family(family_name)
    is_original = _is_original(family, tensors.layout)
    tensors, unused = without_unused(tensors, family.class_name)
    if unused:
        notes.append(f"left out {len(unused)} tensors that the model never uses: {listed(unused)}")
    config = found.config
    if is_original and (config is None or config.get("_class_name") != family.class_name):
        try:
            config, assumed = family.original.diffusers_config(tensors.layout, config or {})
        except (LookupError, ValueError, ArithmeticError) as error:
            raise ValueError(
                f"{setting}: {found.weights} does not tell the sizes of a {family_name} ({error}); "
                "put the transformer's config.json beside it"
            ) from error
        notes += assumed
    if not is_original:
        check_guidance(config, tensors.layout, found.config_path, setting)
    layout = "original" if is_original else "diffusers"
    return Checkpoint(found.weights, layout, family_name, config, tensors, notes=notes)


def _open_experts(found: ExpertsInput, setting: str) -> Checkpoint:
    parts = {
        folder: _open_safetensors(part, setting)
        for folder, part in zip(FOLDERS, (found.high, found.low))
    }
    for part in parts.values():
        part.check(setting)
    high, low = parts.values()
    if (high.format, high.one_architecture) != (low.format, low.one_architecture):
        raise ValueError(
            f"{setting}: {high.path} ({high.format} format) and {low.path} ({low.format} format) "
            "differ in their format or architecture; two experts have one"
        )
    tensors = InFolders({folder: part.tensors for folder, part in parts.items()})
    notes = [f"{folder}: {note}" for folder, part in parts.items() for note in part.notes]
    return replace(high, path=found.path, tensors=tensors, notes=notes, folders=FOLDERS)


def _family_of(layout: Mapping[str, TensorInfo], found: SafetensorsInput, setting: str) -> str:
    """The family that the configuration or the authors' names tell."""
    class_name = (found.config or {}).get("_class_name")
    families = {name: model_family(name) for name in family_names()}
    for name, family in families.items():
        if class_name == family.class_name or _is_original(family, layout):
            return name
    if class_name is None:
        raise ValueError(
            f"{setting}: {found.config_path} is not there or has no _class_name; put the "
            "transformer's config.json beside the weights"
        )
    known = ", ".join(family.class_name for family in families.values())
    raise ValueError(
        f"{setting}: {found.config_path} describes a {class_name}; what can be converted: {known}"
    )


def _is_original(family: ModelFamily, layout: Mapping[str, TensorInfo]) -> bool:
    return family.original is not None and family.original.marker in layout


def _open_megatron(path: Path, setting: str, average: bool, verified: bool) -> Checkpoint:
    tensors = StoredTensors(path, average)
    wrong = damage(path) if verified else None
    if wrong is not None:
        raise ValueError(f"{setting}: checkpoint {path} is damaged: {wrong}")
    if (path / CONFIG).is_file():
        config = read_json(path / CONFIG, setting)
        name = next(
            (n for n in family_names() if model_family(n).class_name == config.get("_class_name")),
            None,
        )
        if name is None:
            raise ValueError(
                f"{setting}: {path / CONFIG} describes a {config.get('_class_name')}, which is no "
                f"model of this program"
            )
    else:
        name, config = run_transformer(path, setting)
    step = tensors.manifest.iteration or None
    prefixes = tuple(f"{name}." for name in NAMES)
    has_experts = len(tensors) > 0 and all(n.startswith(prefixes) for n in tensors)
    folders = FOLDERS if has_experts else FOLDERS[:1]
    return Checkpoint(path, "megatron", name, config, tensors, step, folders=folders)
