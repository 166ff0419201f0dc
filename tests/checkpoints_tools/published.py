# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Small models in the files and names in which people publish them, and reading them back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from megatron_leangrpo.models.flux.config import FluxConfig, to_diffusers_config
from megatron_leangrpo.models.loading import INDEX, WEIGHTS
from tests.models.flux_parity import small_config

Tensors = dict[str, torch.Tensor]

STEM = WEIGHTS.removesuffix(".safetensors")


def save_folder(folder: Path, tensors: Tensors, config: dict[str, Any] | None = None) -> Path:
    """A diffusers transformer folder with one weight file."""
    folder.mkdir(parents=True)
    config = to_diffusers_config(small_config()) if config is None else config
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / WEIGHTS)
    return folder


def save_shards(folder: Path, tensors: Tensors, parts: int = 3) -> dict[str, str]:
    """Shards with an index in place of the single file; returns the map from name to file."""
    (folder / WEIGHTS).unlink(missing_ok=True)
    names, weight_map = list(tensors), {}
    for part in range(parts):
        file = f"{STEM}-{part + 1:05d}-of-{parts:05d}.safetensors"
        own = names[part * len(names) // parts : (part + 1) * len(names) // parts]
        save_file({name: tensors[name] for name in own}, folder / file)
        weight_map.update(dict.fromkeys(own, file))
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    """The index of a sharded folder."""
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def read_folder(folder: Path) -> Tensors:
    """All tensors of an exported folder, which holds the files its index names and no others."""
    files = {p.name for p in folder.iterdir()} - {"config.json"}
    if INDEX not in files:
        assert files == {WEIGHTS}
        return load_file(folder / WEIGHTS)
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    assert files - {INDEX} == set(weight_map.values())
    tensors: Tensors = {}
    for file in sorted(set(weight_map.values())):
        shard = load_file(folder / file)
        assert dict.fromkeys(shard, file).items() <= weight_map.items()
        tensors |= shard
    assert tensors.keys() == weight_map.keys()
    return tensors


def same(actual: Tensors, expected: Tensors) -> bool:
    """The same names, dtypes and bits."""
    return actual.keys() == expected.keys() and all(
        actual[n].dtype == t.dtype and torch.equal(actual[n], t) for n, t in expected.items()
    )


def flux_original(state: Tensors, config: FluxConfig) -> Tensors:
    """FLUX under its authors' names and in their layout, written down apart from our table."""
    out: Tensors = {}

    def copy(new: str, old: str) -> None:
        for kind in ("weight", "bias"):
            out[f"{new}.{kind}"] = state[f"{old}.{kind}"]

    def join(new: str, *olds: str) -> None:
        for kind in ("weight", "bias"):
            out[f"{new}.{kind}"] = torch.cat([state[f"{old}.{kind}"] for old in olds])

    def norms(new: str, query: str, key: str) -> None:
        out[f"{new}.query_norm.scale"] = state[f"{query}.weight"]
        out[f"{new}.key_norm.scale"] = state[f"{key}.weight"]

    copy("img_in", "x_embedder")
    copy("txt_in", "context_embedder")
    embedders = {"time_in": "timestep", "vector_in": "text"}
    if config.guidance_embeds:
        embedders["guidance_in"] = "guidance"
    for new, old in embedders.items():
        copy(f"{new}.in_layer", f"time_text_embed.{old}_embedder.linear_1")
        copy(f"{new}.out_layer", f"time_text_embed.{old}_embedder.linear_2")
    for n in range(config.num_double_blocks):
        new, old = f"double_blocks.{n}", f"transformer_blocks.{n}"
        copy(f"{new}.img_mod.lin", f"{old}.norm1.linear")
        copy(f"{new}.txt_mod.lin", f"{old}.norm1_context.linear")
        attn = f"{old}.attn"
        join(f"{new}.img_attn.qkv", f"{attn}.to_q", f"{attn}.to_k", f"{attn}.to_v")
        added = [f"{attn}.add_{letter}_proj" for letter in "qkv"]
        join(f"{new}.txt_attn.qkv", *added)
        norms(f"{new}.img_attn.norm", f"{attn}.norm_q", f"{attn}.norm_k")
        norms(f"{new}.txt_attn.norm", f"{attn}.norm_added_q", f"{attn}.norm_added_k")
        copy(f"{new}.img_attn.proj", f"{attn}.to_out.0")
        copy(f"{new}.txt_attn.proj", f"{attn}.to_add_out")
        for stream, ff in (("img", "ff"), ("txt", "ff_context")):
            copy(f"{new}.{stream}_mlp.0", f"{old}.{ff}.net.0.proj")
            copy(f"{new}.{stream}_mlp.2", f"{old}.{ff}.net.2")
    for n in range(config.num_single_blocks):
        new, old = f"single_blocks.{n}", f"single_transformer_blocks.{n}"
        attn = f"{old}.attn"
        copy(f"{new}.modulation.lin", f"{old}.norm.linear")
        projections = (f"{attn}.to_q", f"{attn}.to_k", f"{attn}.to_v", f"{old}.proj_mlp")
        join(f"{new}.linear1", *projections)
        copy(f"{new}.linear2", f"{old}.proj_out")
        norms(f"{new}.norm", f"{attn}.norm_q", f"{attn}.norm_k")
    copy("final_layer.linear", "proj_out")
    for kind in ("weight", "bias"):
        scale, shift = state[f"norm_out.linear.{kind}"].chunk(2)
        out[f"final_layer.adaLN_modulation.1.{kind}"] = torch.cat((shift, scale))
    return out
