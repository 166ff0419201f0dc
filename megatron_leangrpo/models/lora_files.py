# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""LoRA files under diffusers' names: reads what diffusers, PEFT and kohya's trainers write.

Everything in a file is used or the file is refused; nothing of it is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_leangrpo.models.common.lora_targets import A, B, LowRank, check_projections
from megatron_leangrpo.models.common.weights import Rule
from megatron_leangrpo.models.loading import WeightFiles, read_json
from megatron_leangrpo.models.lora_config import (
    FIRST,
    SECOND,
    check_plain,
    read_metadata,
    stated_alpha,
)

WEIGHTS = "pytorch_lora_weights.safetensors"
_PEFT_WEIGHTS, _PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_SHOWN = 4

_TENSOR = re.compile(
    r"(?P<module>.+?)\.(?:lora_(?P<letter>[AB])|lora[_.](?P<way>down|up))(?:\.default)?\.weight"
)
_ALPHA = re.compile(r"(?P<module>.+)\.alpha")
_PREFIX = re.compile(
    r"^(base_model\.model\.(transformer\.)?|(model\.)?diffusion_model\.|transformer\.|lora_unet_"
    r"|lora_transformer_)"
)
# What is more, or other, than a product of two matrices.
_OTHER_KINDS = {
    "DoRA": ("dora_scale", "lora_magnitude_vector"),
    "LoKr": ("lokr_",),
    "LoHa": ("hada_",),
    "OFT": ("oft_", "boft_"),
    "convolutions (LoCon)": ("lora_mid",),
    "biases": ("lora_A.bias", "lora_B.bias"),
    "whole differences of weights": (".diff", ".diff_b"),
}


@dataclass(frozen=True)
class LoraFile:
    """The adapters of a file."""

    projections: dict[str, LowRank]
    """By diffusers' name of the projection."""
    tensors: dict[str, torch.Tensor]
    """`<projection>.lora_A.weight` and `<projection>.lora_B.weight`."""


@dataclass(frozen=True)
class Names:
    """What projections a model has and what else they are called."""

    known: Mapping[str, bool]
    """Diffusers' names; True where the output features are sharded, and so may be fused."""
    diffusers: Sequence[Rule] = ()
    """Our weights and diffusers'."""
    original: Sequence[Rule] = ()
    """Our weights and those of the model's authors."""

    @classmethod
    def of(
        cls, model: torch.nn.Module, diffusers: Sequence[Rule], original: Sequence[Rule]
    ) -> Names:
        """The names of a model, of which this needs no numbers."""
        # megatron-core takes seconds to import.
        from megatron_leangrpo.models.common.linear import ColumnParallelLinear
        from megatron_leangrpo.models.common.lora import adaptable

        known = {
            name: isinstance(layer, ColumnParallelLinear)
            for name, (layer, _) in adaptable(model, diffusers).items()
        }
        return cls(known, diffusers, original)


def read_lora(path: str | Path, names: Names, setting: str = "lora.path") -> LoraFile:
    """Read a file or folder; ``ValueError`` unless all of it has a place in the model."""
    convert = _converter(names)
    projections: dict[str, LowRank] = {}
    tensors: dict[str, torch.Tensor] = {}
    for folder, found in stored_loras(Path(path), setting).items():
        unknown = []
        for module, low in found.modules.items():
            name = f"{folder}.{bare_name(module)}" if folder else module
            parts = convert(name, *found.factors(module))
            if parts is None:
                unknown.append(module)
                continue
            for projection, own_a, own_b in parts:
                if projection in projections:
                    raise ValueError(f"{setting}: {found.file} adapts {projection} twice")
                projections[projection] = low
                tensors[f"{projection}.{A}"] = own_a.contiguous()
                tensors[f"{projection}.{B}"] = own_b.contiguous()
        check_projections(unknown, names.known, f"{setting}: {found.file}")
    return LoraFile(projections, tensors)


def stored_loras(path: Path, setting: str) -> dict[str, StoredLora]:
    """The file at a path under "", or those of two transformers by their folders in it."""
    folders = [name for name in (FIRST, SECOND) if _holds_lora(path / name)]
    if not folders or _holds_lora(path):
        return {"": StoredLora(path, setting)}
    return {name: StoredLora(path / name, setting) for name in folders}


class StoredLora:
    """A file as it is, without a model: its pairs of A and B under the names they have there."""

    def __init__(self, path: str | Path, setting: str) -> None:
        self.file, config = _find(Path(path), setting)
        self.tensors = WeightFiles(self.file, setting, wrappers=())
        _refuse_other_kinds(self.tensors, self.file, setting)
        configs = read_metadata(self.file, setting) if config is None else {FIRST: config}
        for stated in configs.values():
            check_plain(stated, self.file, setting)
        self._pairs, alphas = _pairs(self.tensors, self.file, setting)
        self.modules: dict[str, LowRank] = {}
        """Rank and alpha by name."""
        for module, (a_name, b_name) in self._pairs.items():
            a, b = (self.tensors.layout[name].shape for name in (a_name, b_name))
            if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
                raise ValueError(
                    f"{setting}: {self.file}: A and B of {module} do not fit: {a} and {b}"
                )
            alpha = alphas.get(module)
            if alpha is None:
                alpha = stated_alpha(bare_name(module), a[0], configs)
            self.modules[module] = LowRank(a[0], alpha)

    def names_of(self, module: str) -> tuple[str, str]:
        """What A and B are called."""
        return self._pairs[module]

    def factors(self, module: str) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B."""
        a_name, b_name = self.names_of(module)
        return self.tensors[a_name], self.tensors[b_name]


def bare_name(module: str) -> str:
    """A name without what programs put before it."""
    return _PREFIX.sub("", module)


def is_lora(path: Path, setting: str) -> bool:
    """Whether a path is that of a LoRA file or folder, going by names alone."""
    if path.is_dir():
        return any(map(_holds_lora, (path, path / FIRST, path / SECOND)))
    if path.suffix != ".safetensors" or not path.is_file():
        return False
    return any(re.search(r"lora[_.]|lokr_|hada_", name) for name in WeightFiles(path, setting, ()))


def _holds_lora(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (WEIGHTS, _PEFT_WEIGHTS))


def _find(path: Path, setting: str) -> tuple[Path, dict[str, Any] | None]:
    """The weight file, and what a PEFT folder says beside it."""
    if path.is_dir():
        found = [path / name for name in (WEIGHTS, _PEFT_WEIGHTS) if (path / name).is_file()]
        if len(found) != 1:
            several = sorted(p.name for p in path.glob("*.safetensors"))
            what = f"holds {', '.join(several[:_SHOWN])}" if several else "holds no safetensors"
            raise ValueError(
                f"{setting}: {path} {what}; give a folder with one of {WEIGHTS} and "
                f"{_PEFT_WEIGHTS}, or the path of a file"
            )
        path = found[0]
    if not path.is_file() or path.suffix != ".safetensors":
        what = "is no safetensors file" if path.is_file() else "does not exist"
        raise ValueError(f"{setting}: {path} {what}; give a .safetensors file or its folder")
    beside = path.with_name(_PEFT_CONFIG)
    is_peft = path.name == _PEFT_WEIGHTS and beside.is_file()
    return path, read_json(beside, setting) if is_peft else None


def _refuse_other_kinds(names: Iterable[str], file: Path, setting: str) -> None:
    for kind, marks in _OTHER_KINDS.items():
        found = [n for n in names if any(m in n if m[0] != "." else n.endswith(m) for m in marks)]
        if found:
            raise ValueError(
                f"{setting}: {file} holds {kind} ({len(found)} tensors: {_listed(found)}); only "
                "plain LoRA, the product of A and B, can be read"
            )


def _pairs(
    names: Mapping[str, torch.Tensor], file: Path, setting: str
) -> tuple[dict[str, tuple[str, str]], dict[str, float]]:
    """The names of A and B by projection, and the alphas that are tensors."""
    halves: dict[str, dict[str, str]] = {}
    alphas, unknown = {}, []
    for name in names:
        if match := _TENSOR.fullmatch(name):
            letter = match["letter"] or {"down": "A", "up": "B"}[match["way"]]
            halves.setdefault(match["module"], {})[letter] = name
        elif match := _ALPHA.fullmatch(name):
            alphas[match["module"]] = float(names[name])
        else:
            unknown.append(name)
    if unknown or not halves:
        what = f"holds {len(unknown)} tensors that are no LoRA's: {_listed(unknown)}"
        raise ValueError(f"{setting}: {file} {what if unknown else 'holds no LoRA'}")
    lone = [f"{module} has no lora_{'B' if 'A' in h else 'A'}" for module, h in halves.items()
            if len(h) != 2]  # fmt: skip
    lone += [f"{module} has an alpha alone" for module in alphas if module not in halves]
    if lone:
        raise ValueError(f"{setting}: {file} is not whole: {_listed(lone)}")
    return {module: (half["A"], half["B"]) for module, half in halves.items()}, alphas


Parts = list[tuple[str, torch.Tensor, torch.Tensor]]


def _converter(names: Names) -> Callable[[str, torch.Tensor, torch.Tensor], Parts | None]:
    """From a name in a file, A and B to diffusers' projections with theirs; None for no such."""
    original = {_stem(n): (rule, i) for rule in names.original for i, n in enumerate(rule.theirs)}
    rule_of_ours = {name: rule for rule in names.diffusers for name in rule.ours}
    called = {}
    for table in (original, names.known):
        # kohya's trainers write underscores for dots.
        called |= {name.replace(".", "_"): name for name in table}
        called |= {name: name for name in table}

    def convert(module: str, a: torch.Tensor, b: torch.Tensor) -> Parts | None:
        name = called.get(module) or called.get(bare_name(module))
        if name is None or name in names.known:
            return None if name is None else [(name, a, b)]
        rule, position = original[name]
        theirs = rule_of_ours.get(rule.ours[0])
        if theirs is None or _stem(theirs.theirs[0]) not in names.known:
            return None
        if len(rule.theirs) > 1:
            return [(_stem(theirs.theirs[position]), a, b)]
        if not names.known[_stem(theirs.theirs[0])]:
            return [(_stem(theirs.theirs[0]), a, b)]
        return _split(rule, rule_of_ours, a, b)

    return convert


def _split(rule: Rule, rule_of_ours: Mapping[str, Rule], a: torch.Tensor, b: torch.Tensor) -> Parts:
    """One adapter of fused rows as one of each projection: all have its A and their rows of B."""
    parts = []
    for ours, rows in zip(rule.ours, rule.to_ours((b,))):
        theirs = rule_of_ours[ours]
        parts += [(_stem(n), a, own) for n, own in zip(theirs.theirs, theirs.to_theirs((rows,)))]
    return parts


def _stem(weight_name: str) -> str:
    return weight_name.removesuffix(".weight")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
