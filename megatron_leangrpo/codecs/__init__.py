# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Latent codecs: from packed latents to images."""

from megatron_leangrpo.codecs.base import FLUX_MULTIPLE, LatentCodec, check_size
from megatron_leangrpo.codecs.patch import PatchCodec
from megatron_leangrpo.codecs.vae import VaeCodec

__all__ = ["FLUX_MULTIPLE", "LatentCodec", "PatchCodec", "VaeCodec", "check_size"]
