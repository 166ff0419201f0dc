# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""A VAE out of a pipeline folder, whole or not at all."""

from pathlib import Path
from typing import Any


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
