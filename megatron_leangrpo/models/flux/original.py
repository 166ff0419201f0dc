# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""FLUX as its authors publish it: their names, fused projections, and no `config.json`.

Source of the correspondence: huggingface/diffusers, scripts/convert_flux_to_diffusers.py. In the
last modulation the authors' order is (shift, scale) and diffusers' (scale, shift); issue 10198
there is about what happens when that is missed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from megatron_leangrpo.models.common.conversion import TensorInfo
from megatron_leangrpo.models.common.weights import (
    Rule,
    Tensors,
    concatenated,
    heads_interleaved,
    same,
)
from megatron_leangrpo.models.flux.config import FluxConfig

MARKER = "img_in.weight"
_PUBLISHED_HEAD_DIM = 128


def weight_rules(config: FluxConfig) -> list[Rule]:
    """The rules of a whole model; every parameter and every published tensor is in exactly one."""
    rules = _linears("img_in") + _linears("txt_in")
    for embedder in ("time_in", "vector_in") + ("guidance_in",) * config.guidance_embeds:
        rules += _linears(f"{embedder}.in_layer") + _linears(f"{embedder}.out_layer")
    for n in range(config.num_double_blocks):
        rules += _double_block(f"double_blocks.{n}", config.head_dim)
    for n in range(config.num_single_blocks):
        rules += _single_block(f"single_blocks.{n}", config)
    for kind in ("weight", "bias"):
        ours, theirs = (
            f"final_layer.modulation.linear.{kind}",
            f"final_layer.adaLN_modulation.1.{kind}",
        )
        rules.append(Rule((ours,), (theirs,), _swap_halves, _swap_halves))
    return rules + _linears("final_layer.linear")


def _double_block(block: str, head_dim: int) -> list[Rule]:
    rules = []
    for stream, added in (("img", ""), ("txt", "added_")):
        attention = f"{block}.{stream}_attn"
        rules += _linears(f"{block}.{stream}_mod.linear", f"{block}.{stream}_mod.lin")
        for kind in ("weight", "bias"):
            ours = f"{block}.attn.{added}linear_qkv.{kind}"
            rules.append(_fused_qkv(ours, f"{attention}.qkv.{kind}", head_dim))
        rules += _norms(f"{block}.attn.{added}", f"{attention}.norm")
        rules += _linears(f"{block}.attn.{added}linear_proj", f"{attention}.proj")
        rules += _linears(f"{block}.{stream}_mlp.linear_fc1", f"{block}.{stream}_mlp.0")
        rules += _linears(f"{block}.{stream}_mlp.linear_fc2", f"{block}.{stream}_mlp.2")
    return rules


def _single_block(block: str, config: FluxConfig) -> list[Rule]:
    rules = _linears(f"{block}.modulation.linear", f"{block}.modulation.lin")
    rules += [_fused_input(block, kind, config) for kind in ("weight", "bias")]
    rules += _norms(f"{block}.", f"{block}.norm")
    rules.append(
        concatenated(
            (f"{block}.linear_out.attn_weight", f"{block}.linear_out.mlp_weight"),
            f"{block}.linear2.weight",
            sizes=(config.hidden_size, config.ffn_hidden_size),
            dim=1,
        )
    )
    rules.append(same(f"{block}.linear_out.bias", f"{block}.linear2.bias"))
    return rules


def _linears(ours: str, theirs: str | None = None) -> list[Rule]:
    return [same(f"{ours}.{kind}", f"{theirs or ours}.{kind}") for kind in ("weight", "bias")]


def _norms(ours: str, theirs: str) -> list[Rule]:
    return [
        same(f"{ours}q_layernorm.weight", f"{theirs}.query_norm.scale"),
        same(f"{ours}k_layernorm.weight", f"{theirs}.key_norm.scale"),
    ]


def _fused_qkv(ours: str, theirs: str, head_dim: int) -> Rule:
    """Theirs is all of q, all of k, all of v; ours alternates head by head."""
    by_head = heads_interleaved(ours, ("q", "k", "v"), head_dim)
    return Rule(
        (ours,),
        (theirs,),
        lambda tensors: by_head.to_ours(tensors[0].chunk(3)),
        lambda tensors: (torch.cat(by_head.to_theirs(tensors)),),
    )


def _fused_input(block: str, kind: str, config: FluxConfig) -> Rule:
    """Their first linear of a single block is q, k, v and the MLP's input in one."""
    qkv, mlp = f"{block}.linear_qkv.{kind}", f"{block}.linear_fc1.{kind}"
    by_head = heads_interleaved(qkv, ("q", "k", "v"), config.head_dim)
    sizes = (3 * config.hidden_size, config.ffn_hidden_size)

    def to_ours(tensors: Tensors) -> Tensors:
        rows, mlp_rows = tensors[0].split(sizes)
        return (*by_head.to_ours(rows.chunk(3)), mlp_rows)

    def to_theirs(tensors: Tensors) -> Tensors:
        return (torch.cat((*by_head.to_theirs(tensors[:1]), tensors[1])),)

    return Rule((qkv, mlp), (f"{block}.linear1.{kind}",), to_ours, to_theirs)


def _swap_halves(tensors: Tensors) -> Tensors:
    first, second = tensors[0].chunk(2)
    return (torch.cat((second, first)),)


def diffusers_config(
    layout: Mapping[str, TensorInfo], beside: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """The `config.json` that these tensors belong to, and what had to be assumed for it.

    The authors publish no configuration `beside` the file.
    ``KeyError`` or ``ValueError`` where the tensors are not those of a FLUX.
    """
    hidden, in_channels = layout["img_in.weight"].shape
    (head_dim,) = layout["double_blocks.0.img_attn.norm.query_norm.scale"].shape
    # 16, 56, 56 of 128 as published; rotary dimensions are even.
    side = head_dim * 7 // 16 // 2 * 2
    axes = [head_dim - 2 * side, side, side]
    notes = []
    if head_dim != _PUBLISHED_HEAD_DIM:
        notes.append(
            f"axes_dims_rope is not in such a file and was taken to be {axes} of {head_dim}; if "
            "that is wrong, put the model's config.json beside the file"
        )
    config = {
        "_class_name": "FluxTransformer2DModel",
        "attention_head_dim": head_dim,
        "axes_dims_rope": axes,
        "guidance_embeds": "guidance_in.in_layer.weight" in layout,
        "in_channels": in_channels,
        "joint_attention_dim": layout["txt_in.weight"].shape[1],
        "num_attention_heads": hidden // head_dim,
        "num_layers": _count("double_blocks", layout),
        "num_single_layers": _count("single_blocks", layout),
        "out_channels": layout["final_layer.linear.weight"].shape[0],
        "patch_size": 1,
        "pooled_projection_dim": layout["vector_in.in_layer.weight"].shape[1],
    }
    return config, notes


def _count(blocks: str, layout: Mapping[str, TensorInfo]) -> int:
    found = (re.match(rf"{blocks}\.(\d+)\.", name) for name in layout)
    return max((int(match[1]) + 1 for match in found if match), default=0)
