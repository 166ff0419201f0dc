# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Wan as its authors publish it: the sizes of a model from its tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from megatron_leangrpo.models.common.conversion import TensorInfo
from megatron_leangrpo.models.wan.config import PATCH, WanConfig, to_diffusers_config
from megatron_leangrpo.models.wan.weight_map import weight_rules as all_weight_rules

MARKER = "text_embedding.0.weight"
_HEAD_DIM = 128

weight_rules = partial(all_weight_rules, naming="original")


def diffusers_config(
    layout: Mapping[str, TensorInfo], beside: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """The `config.json` that these tensors belong to, and what had to be assumed for it.

    The authors' own `config.json` beside the files says how many heads there are.
    ``KeyError`` or ``ValueError`` where the tensors are not those of a Wan.
    """
    hidden, in_channels = layout["patch_embedding.weight"].shape[:2]
    heads = beside.get("num_heads", hidden // _HEAD_DIM)
    if not isinstance(heads, int) or heads < 1 or hidden % heads:
        raise ValueError(f"the number of heads of width {hidden} is not known")
    image = layout.get("img_emb.proj.0.weight")
    found = (re.match(r"blocks\.(\d+)\.", name) for name in layout)
    config = WanConfig(
        num_layers=max((int(match[1]) + 1 for match in found if match), default=0),
        hidden_size=hidden,
        num_attention_heads=heads,
        ffn_hidden_size=layout["blocks.0.ffn.0.weight"].shape[0],
        in_channels=in_channels,
        out_channels=layout["head.head.weight"].shape[0] // PATCH,
        joint_attention_dim=layout["text_embedding.0.weight"].shape[1],
        image_dim=None if image is None else image.shape[0],
    )
    return to_diffusers_config(config), []
