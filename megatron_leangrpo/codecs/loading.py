# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""A VAE out of a pipeline folder, whole or not at all, and what codecs of such VAEs share."""

from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from megatron_leangrpo.codecs.base import token_grid

# Pixels decoded at once: memory must not grow with the batch. One 480 x 832 x 81 video has 32 M.
PIXELS_PER_CHUNK = 2**20


class PipelineVae:
    """A frozen VAE of a pipeline as a codec, without tiling.

    Args:
        vae: of diffusers.
        multiple: pixels per token side.
    """

    vae_class: ClassVar[str]
    pipeline: ClassVar[str]
    """Whose folder it comes from, for messages."""

    def __init__(self, vae: Any, multiple: int) -> None:
        self.vae, self.multiple = vae.eval().requires_grad_(False), multiple

    @classmethod
    def from_pipeline(
        cls,
        folder: str | Path,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Load only the VAE of a folder written by the pipeline's `save_pretrained`."""
        import diffusers

        vae = load_vae(getattr(diffusers, cls.vae_class), folder, cls.pipeline)
        return cls(vae.to(device, dtype))

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tokens (of a video: of a frame); ValueError for another size."""
        return token_grid(height, width, self.multiple)

    def decode_unpacked(self, latents: Tensor, pixels: int) -> Tensor:
        """What the VAE makes of its latents, in [0, 1] and float32; `pixels` are those of each."""
        chunk = max(1, PIXELS_PER_CHUNK // pixels)
        parts = [self.vae.decode(part).sample.float() for part in latents.split(chunk)]
        return (torch.cat(parts) / 2 + 0.5).clamp(0, 1)


def load_vae(kind: Any, folder: str | Path, pipeline: str) -> Any:
    """`kind.from_pretrained` of the folder's VAE; ValueError names the folder and the cause."""
    folder = Path(folder) / "vae"
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"model.base: {folder} is not the VAE of a {pipeline} pipeline, config.json is missing"
        )
    try:
        vae, report = kind.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    except Exception as error:
        cause = " ".join(str(error).split())
        raise ValueError(f"model.base: {folder} cannot be loaded: {cause:.300}") from error
    if missing := sorted(report["missing_keys"]):
        # diffusers would fill them with random numbers.
        raise ValueError(
            f"model.base: {folder} misses {len(missing)} of the VAE's tensors, such as {missing[0]}"
        )
    return vae
