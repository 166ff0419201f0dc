# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters in a LoRA file or in the checkpoint of a run that trained them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints_tools.inputs import find_input
from checkpoints_tools.opening import Checkpoint, open_checkpoint
from checkpoints_tools.runs import run_config
from megatron_leangrpo.checkpoint.store import damage
from megatron_leangrpo.checkpoint.stored import StoredTensors
from megatron_leangrpo.grpo.architecture import Architecture, resolve_architecture
from megatron_leangrpo.models.common.conversion import Converted, InMemory, Renamed, TensorSource
from megatron_leangrpo.models.common.lora import adapter_rules, attach_adapters
from megatron_leangrpo.models.common.lora_targets import A, B, LowRank
from megatron_leangrpo.models.common.weights import ADAPTER, full_shapes, random_weights
from megatron_leangrpo.models.experts import InFolders
from megatron_leangrpo.models.lora_files import LoraFile, Names, bare_name, is_lora, stored_loras
from megatron_leangrpo.models.lora_files import read_lora as read_for_model
from megatron_leangrpo.models.lora_merging import Merged, WeightChanges


@dataclass(frozen=True)
class Adapters:
    """Adapters by projection, and what is known of where they are from."""

    path: Path
    projections: dict[str, LowRank]
    tensors: TensorSource
    """A and B under PEFT's names, without what stands before them in a file."""
    architecture: Architecture | None = None
    """Of the run that trained them; None for a file."""
    step: int | None = None

    @property
    def theirs(self) -> WeightChanges:
        """What they change, under the names of diffusers' weights."""
        return WeightChanges(self.projections, self.tensors)


def find_adapters(
    path: str, setting: str, average: bool = False, verified: bool = True
) -> Adapters | None:
    """The adapters at `path`; None where it holds whole weights."""
    if is_lora(Path(path), setting):
        if average:
            raise ValueError(f"--average: {path} is no checkpoint of a run and has no average")
        return _from_files(Path(path), setting)
    found = find_input(Path(path), setting)
    if not isinstance(found, Path):
        return None
    stored = StoredTensors(found, average)
    if not any(ADAPTER in name for name in stored):
        return None
    wrong = damage(found) if verified else None
    if wrong is not None:
        raise ValueError(f"{setting}: checkpoint {found} is damaged: {wrong}")
    return _from_run(found, stored, setting)


def _from_files(path: Path, setting: str) -> Adapters:
    sources, projections = {}, {}
    for folder, stored in stored_loras(path, setting).items():
        names, own = {}, {}
        for module, low in stored.modules.items():
            bare = bare_name(module)
            if bare in own:
                raise ValueError(f"{setting}: {stored.file} adapts {bare} twice")
            own[bare] = low
            names |= {f"{bare}.{letter}": n for letter, n in zip((A, B), stored.names_of(module))}
        sources[folder] = Renamed(stored.tensors, names)
        projections |= {f"{folder}.{name}" if folder else name: low for name, low in own.items()}
        file = stored.file
    if "" in sources:
        return Adapters(file, projections, sources[""])
    return Adapters(path, projections, InFolders(sources))


def _from_run(checkpoint: Path, stored: StoredTensors, setting: str) -> Adapters:
    config = run_config(checkpoint, setting)
    single = dataclasses.replace(
        config.parallel, tensor_model_parallel_size=1, context_parallel_size=1
    )
    architecture = resolve_architecture(dataclasses.replace(config, parallel=single))
    if architecture.adaptation is None:
        raise ValueError(f"{setting}: {checkpoint} holds adapters; its run has lora.rank = 0")
    model, projections = architecture.on_meta, architecture.adaptation.projections
    attach_adapters(model, architecture.weight_rules, projections)
    rules = adapter_rules(model)
    expected = {name for rule in rules for name in rule.ours}
    if expected != stored.layout.keys():
        other = sorted(expected ^ stored.layout.keys())[0]
        raise ValueError(f"{setting}: {checkpoint} has other adapters than its run says: {other}")
    tensors = Converted(stored, rules, to_ours=False)
    step = stored.manifest.iteration or None
    return Adapters(checkpoint, projections, tensors, architecture, step)


def merged_run(adapters: Adapters) -> tuple[dict[str, Any], TensorSource, Sequence[str]]:
    """Diffusers' `config.json`, the full weights of a run's base with its adapters, and the
    folders of a pipeline that they are of.

    They have the run's dtype: rounded to a base's narrower one, little would stay of small changes.
    """
    architecture = adapters.architecture
    if architecture is None:
        raise ValueError(
            f"--merged: {adapters.path} is an adapter alone; give its base as --input and the "
            "adapter as --lora"
        )
    config, weights = _base(architecture)
    merged = Merged(weights, adapters.theirs, str(adapters.path), architecture.config.params_dtype)
    return config, merged, architecture.config.transformer_folders


def _base(architecture: Architecture) -> tuple[dict[str, Any], TensorSource]:
    path = architecture.weights
    if path is None and architecture.base is not None:
        has_experts = architecture.config.experts > 1
        path = architecture.base if has_experts else architecture.base / "transformer"
    if path is not None:
        base = open_checkpoint(path, "model.base")
        return base.config, base.theirs
    shapes = full_shapes(architecture.on_meta, architecture.weight_rules)
    dtype = architecture.config.params_dtype
    drawn = random_weights(shapes, architecture.seed)
    weights = InMemory({name: drawn[name].to(dtype) for name in drawn})
    return architecture.family.to_diffusers_config(architecture.config), weights


def merged_file(source: Checkpoint, lora: str) -> TensorSource:
    """The weights of a checkpoint with a LoRA file in them; all of the file must have a place."""
    names = Names.of(source.model, source.weight_rules, source.original_rules)
    file: LoraFile = read_for_model(lora, names, "--lora")
    return Merged(source.theirs, WeightChanges(file.projections, file.tensors), f"--lora: {lora}")


def describe_adapters(adapters: Adapters) -> dict[str, Any]:
    """What `inspect` says of adapters; plain JSON."""
    layout = adapters.tensors.layout
    dtypes = Counter(str(info.dtype).removeprefix("torch.") for info in layout.values())
    architecture = adapters.architecture
    described: dict[str, Any] = {
        "path": str(adapters.path),
        "format": "LoRA" if architecture is None else "megatron, adapters alone",
        "projections": len(adapters.projections),
        "ranks": sorted({low.rank for low in adapters.projections.values()}),
        "alphas": sorted({low.alpha for low in adapters.projections.values()}),
        "parameters": sum(info.num_elements for info in layout.values()),
        "bytes": sum(info.num_bytes for info in layout.values()),
        "dtypes": dict(dtypes),
        "tensors": {
            name: {"shape": list(info.shape), "dtype": str(info.dtype).removeprefix("torch.")}
            for name, info in layout.items()
        },
    }
    if architecture is not None:
        base = architecture.weights or architecture.base
        described["base"] = "random weights" if base is None else str(base)
        described["step"] = adapters.step
    return described
