# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Wan weights under our names, diffusers' and the authors': one table, read in all directions.

The two published namings hold the same tensors in the same shapes. Mind the norms: the one with
weights is the authors' norm3 and diffusers' norm2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from megatron_leangrpo.models.common.weights import Rule, heads_interleaved, same
from megatron_leangrpo.models.wan.config import PATCH, PATCH_SIZE, WanConfig

Naming = Literal["diffusers", "original"]

Names = str | tuple[str, ...]
Join = Callable[[str, Names, WanConfig], list[Rule]]
Row = tuple[Join, str, Names, Names]
"""How tensors are joined; then our name, diffusers' and the authors'."""


def weight_rules(config: WanConfig, naming: Naming = "diffusers") -> list[Rule]:
    """The rules of one transformer; every parameter and every published tensor is in exactly one.

    `naming` says whose names the published side has.
    """
    return [
        rule
        for join, ours, diffusers, original in _rows(config)
        for rule in join(ours, diffusers if naming == "diffusers" else original, config)
    ]


def _rows(config: WanConfig) -> Iterator[Row]:
    embedders, block = _EMBEDDERS, _BLOCK
    if config.image_dim:
        embedders, block = embedders + _IMAGE_EMBEDDER, block + _IMAGE_ATTENTION
    yield from _ENDS
    for join, ours, diffusers, original in embedders:
        yield join, ours, _inside("condition_embedder", diffusers), original
    for n in range(config.num_layers):
        for join, *names in block:
            yield (join, *(_inside(f"blocks.{n}", name) for name in names))


def _inside(prefix: str, names: Names) -> Names:
    if isinstance(names, str):
        return f"{prefix}.{names}"
    return tuple(f"{prefix}.{name}" for name in names)


def _table(ours: str, theirs: str, config: WanConfig) -> list[Rule]:
    return [same(ours, theirs)]


def _scale(ours: str, theirs: str, config: WanConfig) -> list[Rule]:
    return [same(f"{ours}.weight", f"{theirs}.weight")]


def _linear(ours: str, theirs: str, config: WanConfig) -> list[Rule]:
    return [same(f"{ours}.{kind}", f"{theirs}.{kind}") for kind in ("weight", "bias")]


def _by_head(ours: str, theirs: tuple[str, ...], config: WanConfig) -> list[Rule]:
    return [
        heads_interleaved(
            f"{ours}.{kind}", tuple(f"{name}.{kind}" for name in theirs), config.head_dim
        )
        for kind in ("weight", "bias")
    ]


def _patch_in(ours: str, theirs: str, config: WanConfig) -> list[Rule]:
    """Theirs is a convolution whose kernel is as large as its stride: a linear over patches."""
    weight = Rule(
        (f"{ours}.weight",),
        (f"{theirs}.weight",),
        lambda tensors: (tensors[0].flatten(1),),
        lambda tensors: (tensors[0].unflatten(1, (config.in_channels, *PATCH_SIZE)),),
    )
    return [weight, same(f"{ours}.bias", f"{theirs}.bias")]


def _patch_out(ours: str, theirs: str, config: WanConfig) -> list[Rule]:
    """Their rows are (2, 2, c); ours are (c, 2, 2), the order in which latents are packed."""

    def swapped(outer: int) -> Callable:
        return lambda tensors: (tensors[0].unflatten(0, (outer, -1)).transpose(0, 1).flatten(0, 1),)

    return [
        Rule(
            (f"{ours}.{kind}",), (f"{theirs}.{kind}",), swapped(PATCH), swapped(config.out_channels)
        )
        for kind in ("weight", "bias")
    ]


# fmt: off
_ENDS: tuple[Row, ...] = (
    (_patch_in, "patch_embedding", "patch_embedding", "patch_embedding"),
    (_table, "head.modulation", "scale_shift_table", "head.modulation"),
    (_patch_out, "head.linear", "proj_out", "head.head"),
)
# diffusers keeps these in `condition_embedder`.
_EMBEDDERS: tuple[Row, ...] = (
    (_linear, "text_embedding.in_layer", "text_embedder.linear_1", "text_embedding.0"),
    (_linear, "text_embedding.out_layer", "text_embedder.linear_2", "text_embedding.2"),
    (_linear, "time_embedding.in_layer", "time_embedder.linear_1", "time_embedding.0"),
    (_linear, "time_embedding.out_layer", "time_embedder.linear_2", "time_embedding.2"),
    (_linear, "time_projection", "time_proj", "time_projection.1"),
)
_IMAGE_EMBEDDER: tuple[Row, ...] = (
    (_linear, "img_emb.norm_in", "image_embedder.norm1", "img_emb.proj.0"),
    (_linear, "img_emb.mlp.in_layer", "image_embedder.ff.net.0.proj", "img_emb.proj.1"),
    (_linear, "img_emb.mlp.out_layer", "image_embedder.ff.net.2", "img_emb.proj.3"),
    (_linear, "img_emb.norm_out", "image_embedder.norm2", "img_emb.proj.4"),
)
_BLOCK: tuple[Row, ...] = (
    (_table, "modulation", "scale_shift_table", "modulation"),
    (_by_head, "self_attn.linear_qkv", ("attn1.to_q", "attn1.to_k", "attn1.to_v"),
     ("self_attn.q", "self_attn.k", "self_attn.v")),
    (_scale, "self_attn.q_rms", "attn1.norm_q", "self_attn.norm_q"),
    (_scale, "self_attn.k_rms", "attn1.norm_k", "self_attn.norm_k"),
    (_linear, "self_attn.linear_proj", "attn1.to_out.0", "self_attn.o"),
    (_linear, "norm3", "norm2", "norm3"),
    (_linear, "cross_attn.linear_q", "attn2.to_q", "cross_attn.q"),
    (_by_head, "cross_attn.linear_kv", ("attn2.to_k", "attn2.to_v"),
     ("cross_attn.k", "cross_attn.v")),
    (_scale, "cross_attn.q_rms", "attn2.norm_q", "cross_attn.norm_q"),
    (_scale, "cross_attn.k_rms", "attn2.norm_k", "cross_attn.norm_k"),
    (_linear, "cross_attn.linear_proj", "attn2.to_out.0", "cross_attn.o"),
    (_linear, "ffn.linear_fc1", "ffn.net.0.proj", "ffn.0"),
    (_linear, "ffn.linear_fc2", "ffn.net.2", "ffn.2"),
)
_IMAGE_ATTENTION: tuple[Row, ...] = (
    (_by_head, "cross_attn.added_linear_kv", ("attn2.add_k_proj", "attn2.add_v_proj"),
     ("cross_attn.k_img", "cross_attn.v_img")),
    (_scale, "cross_attn.added_k_rms", "attn2.norm_added_k", "cross_attn.norm_k_img"),
)
# fmt: on
