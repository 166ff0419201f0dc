# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What other programs put before tensor names, and what they put beside the transformer."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_leangrpo.models.common.conversion import Renamed, TensorSource

# A compiled module, data parallelism, and ComfyUI.
_WRAPPERS = ("_orig_mod.", "module.", "model.diffusion_model.", "diffusion_model.")
_BUNDLES = ("model.diffusion_model.",)
# The other parts of a pipeline in one file with the transformer.
_COMPANIONS = (
    "vae.",
    "first_stage_model.",
    "text_encoders.",
    "text_encoder.",
    "text_encoder_2.",
    "cond_stage_model.",
    "conditioner.",
)
_SHOWN = 4


def without_wrappers(files: TensorSource) -> tuple[TensorSource, list[str]]:
    """The transformer's tensors without what was put before their names, and what was done.

    A name without the prefix that most have stays as it is, so that checking names finds it.
    """
    stored = {name: name for name in files}
    prefix, notes = "", []
    while found := _usual_wrapper(stored):
        prefix += found
        dropped = {n for n in stored if found in _BUNDLES and n.startswith(_COMPANIONS)}
        stored = {n.removeprefix(found): s for n, s in stored.items() if n not in dropped}
        if dropped:
            notes.append(f"left out {len(dropped)} tensors of other parts: {listed(dropped)}")
    if prefix:
        notes.append(f"names are read without {prefix!r} before them")
    return Renamed(files, stored), notes


def _usual_wrapper(names: Iterable[str]) -> str:
    """The prefix that most names have, or nothing."""
    names = [name for name in names if not name.startswith(_COMPANIONS)]
    for prefix in _WRAPPERS:
        if sum(name.startswith(prefix) for name in names) > len(names) / 2:
            return prefix
    return ""


def listed(names: Iterable[str]) -> str:
    """The first few names and how many more there are."""
    names = sorted(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
