# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""FLUX weights under diffusers' names and under ours: one table, read in both directions."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_leangrpo.models.common import weights
from megatron_leangrpo.models.common.weights import (
    Rule,
    concatenated,
    full_tensors,
    gradient_of,
    heads_interleaved,
    load_full_tensors,
    same,
    unwrapped,
)
from megatron_leangrpo.models.flux.config import FluxConfig


def weight_rules(config: FluxConfig) -> list[Rule]:
    """The rules of a whole model; every parameter and every diffusers tensor is in exactly one."""
    rules = _linears("img_in", "x_embedder") + _linears("txt_in", "context_embedder")
    rules += _embedder("time_in", "time_text_embed.timestep_embedder")
    rules += _embedder("vector_in", "time_text_embed.text_embedder")
    if config.guidance_embeds:
        rules += _embedder("guidance_in", "time_text_embed.guidance_embedder")
    for n in range(config.num_double_blocks):
        rules += _double_block(f"double_blocks.{n}", f"transformer_blocks.{n}", config.head_dim)
    for n in range(config.num_single_blocks):
        rules += _single_block(f"single_blocks.{n}", f"single_transformer_blocks.{n}", config)
    rules += _linears("final_layer.modulation.linear", "norm_out.linear")
    rules += _linears("final_layer.linear", "proj_out")
    return rules


def _double_block(ours: str, theirs: str, head_dim: int) -> list[Rule]:
    streams = (
        ("img", "", "norm1", ("to_q", "to_k", "to_v"), "to_out.0", "ff"),
        ("txt", "added_", "norm1_context", ("add_q_proj", "add_k_proj", "add_v_proj"), "to_add_out",
         "ff_context"),
    )  # fmt: skip
    rules = []
    for stream, added, norm, qkv, out, ff in streams:
        rules += _linears(f"{ours}.{stream}_mod.linear", f"{theirs}.{norm}.linear")
        rules += _qkv(f"{ours}.attn.{added}linear_qkv", f"{theirs}.attn", qkv, head_dim)
        for letter in "qk":
            rules.append(
                same(
                    f"{ours}.attn.{added}{letter}_layernorm.weight",
                    f"{theirs}.attn.norm_{added}{letter}.weight",
                )
            )
        rules += _linears(f"{ours}.attn.{added}linear_proj", f"{theirs}.attn.{out}")
        rules += _linears(f"{ours}.{stream}_mlp.linear_fc1", f"{theirs}.{ff}.net.0.proj")
        rules += _linears(f"{ours}.{stream}_mlp.linear_fc2", f"{theirs}.{ff}.net.2")
    return rules


def _single_block(ours: str, theirs: str, config: FluxConfig) -> list[Rule]:
    rules = _linears(f"{ours}.modulation.linear", f"{theirs}.norm.linear")
    rules += _qkv(f"{ours}.linear_qkv", f"{theirs}.attn", ("to_q", "to_k", "to_v"), config.head_dim)
    for letter in "qk":
        rules.append(
            same(f"{ours}.{letter}_layernorm.weight", f"{theirs}.attn.norm_{letter}.weight")
        )
    rules += _linears(f"{ours}.linear_fc1", f"{theirs}.proj_mlp")
    # diffusers multiplies [attention | mlp] with one matrix; ours is one matrix for each part.
    rules.append(
        concatenated(
            (f"{ours}.linear_out.attn_weight", f"{ours}.linear_out.mlp_weight"),
            f"{theirs}.proj_out.weight",
            sizes=(config.hidden_size, config.ffn_hidden_size),
            dim=1,
        )
    )
    rules.append(same(f"{ours}.linear_out.bias", f"{theirs}.proj_out.bias"))
    return rules


def _linears(ours: str, theirs: str) -> list[Rule]:
    return [same(f"{ours}.{kind}", f"{theirs}.{kind}") for kind in ("weight", "bias")]


def _embedder(ours: str, theirs: str) -> list[Rule]:
    return _linears(f"{ours}.in_layer", f"{theirs}.linear_1") + _linears(
        f"{ours}.out_layer", f"{theirs}.linear_2"
    )


def _qkv(ours: str, theirs: str, projections: tuple[str, str, str], head_dim: int) -> list[Rule]:
    return [
        heads_interleaved(
            f"{ours}.{kind}", tuple(f"{theirs}.{p}.{kind}" for p in projections), head_dim
        )
        for kind in ("weight", "bias")
    ]


def load_diffusers_state_dict(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill the model from full tensors under diffusers' names; each is read once.

    Raises ValueError for missing, unknown or misshapen tensors.
    """
    model = unwrapped(model)
    load_full_tensors(model, weight_rules(model.flux_config), tensors)


def export_diffusers_state_dict(
    model: torch.nn.Module, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Full weights under diffusers' names, on every rank; collective over tensor-parallel ranks."""
    model = unwrapped(model)
    rules = weight_rules(model.flux_config)
    return full_tensors(
        model, rules, lambda parameter: parameter.detach().to(dtype or parameter.dtype)
    )


def export_diffusers_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Full gradients under diffusers' names in their own precision, on every rank; collective.

    They are what the gradient buffers hold: reduce them over data- and tensor-parallel ranks first
    (with megatron's distributed optimizer, with `force_all_reduce`).
    """
    model = unwrapped(model)
    return full_tensors(model, weight_rules(model.flux_config), gradient_of)


def initialise(model: torch.nn.Module, seed: int) -> None:
    """Random weights, the same in every layout."""
    model = unwrapped(model)
    weights.initialise(model, weight_rules(model.flux_config), seed)
