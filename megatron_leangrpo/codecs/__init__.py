# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Latent codecs: from packed latents to images and videos."""

from megatron_leangrpo.codecs.base import FLUX_MULTIPLE, LatentCodec, check_size
from megatron_leangrpo.codecs.patch import PatchCodec
from megatron_leangrpo.codecs.vae import VaeCodec
from megatron_leangrpo.codecs.video_patch import VideoPatchCodec
from megatron_leangrpo.codecs.wan_vae import WanVaeCodec

__all__ = [
    "FLUX_MULTIPLE",
    "LatentCodec",
    "PatchCodec",
    "VaeCodec",
    "VideoPatchCodec",
    "WanVaeCodec",
    "check_size",
]
