# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The weights that `leangrpo evaluate --checkpoint` names: checkpoints of a run, and exports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_leangrpo.checkpoint.store import MANIFEST
from megatron_leangrpo.checkpoint.stored import StoredTensors
from megatron_leangrpo.checkpoint.training import load_weights
from megatron_leangrpo.grpo.experiment import Experiment
from megatron_leangrpo.grpo.sampling import find_checkpoint
from megatron_leangrpo.models.common.weights import load_full_tensors
from megatron_leangrpo.models.experts import InFolders
from megatron_leangrpo.models.loading import CONFIG, WeightFiles
from megatron_leangrpo.models.lora_files import is_lora

OPTION = "--checkpoint"
_KINDS = ("average", "live")


@dataclass(frozen=True)
class Candidate:
    """Weights that a user has named."""

    name: str
    path: Path
    """A megatron checkpoint, or a folder that diffusers reads."""
    is_checkpoint: bool
    average: bool = False

    @property
    def run(self) -> Path | None:
        """The run directory that a checkpoint lies in."""
        run = self.path.absolute().parent.parent
        return run if self.is_checkpoint and (run / "metrics.jsonl").is_file() else None

    def load(self, experiment: Experiment) -> None:
        """Put the weights into the policy's model (a collective)."""
        model, architecture = experiment.policy.model, experiment.architecture
        if self.is_checkpoint:
            load_weights(self.path, model, self.average)
            return
        folders = architecture.config.transformer_folders
        inside = [self.path / name for name in folders]
        found = [f if (f / CONFIG).is_file() else self.path for f in inside]
        files = {name: WeightFiles(f, OPTION) for name, f in zip(folders, found)}
        tensors = files[folders[0]] if len(files) == 1 else InFolders(files)
        load_full_tensors(model, architecture.weight_rules, tensors, OPTION)


def find_candidate(text: str) -> Candidate:
    """Find what `--checkpoint` names: RUN, a checkpoint or an export, `:live` or `:average` behind.

    A checkpoint gives its weight average where it has one. ``ValueError`` where nothing is found.
    """
    place, _, kind = text.rpartition(":")
    if kind not in _KINDS:
        place, kind = text, ""
    path = Path(place)
    if is_lora(path, OPTION):
        raise ValueError(f"{OPTION} = {text}: an adapter; give it as --lora.path={place}")
    is_export = any((folder / CONFIG).is_file() for folder in (path, path / "transformer"))
    if is_export and not (path / MANIFEST).is_file():
        if kind:
            raise ValueError(f"{OPTION} = {text}: an export has one set of weights; leave :{kind}")
        return Candidate(_short(path), path, is_checkpoint=False)
    if not path.exists():
        raise ValueError(
            f"{OPTION} = {text!r} does not exist; give a run, a checkpoint of it, or an export"
        )
    checkpoint = find_checkpoint(path)
    has_average = StoredTensors(checkpoint).has_average
    if kind == "average" and not has_average:
        raise ValueError(f"{OPTION} = {text}: {checkpoint} holds no weight average; leave :average")
    average = has_average and kind != "live"
    name = _short(checkpoint) + (f" {kind or 'average'}" if has_average else "")
    return Candidate(name, checkpoint, is_checkpoint=True, average=average)


def find_candidates(texts: Sequence[str]) -> list[Candidate]:
    """Find all that `--checkpoint` names, each once; ``ValueError`` as above."""
    candidates = [find_candidate(text) for text in texts]
    names = [candidate.name for candidate in candidates]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{OPTION}: {twice} is given twice")
    return candidates


def _short(path: Path) -> str:
    """The run's name and the step's."""
    path = path.absolute()
    parts = [p for p in path.parts[-3:] if p not in ("checkpoints", "export", "/")]
    return "/".join(parts[-2:])
