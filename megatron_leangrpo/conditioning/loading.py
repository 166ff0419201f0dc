# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Tokenizers and text encoders out of a pipeline folder, whole or not at all."""

from pathlib import Path
from typing import Any

import torch


def check_parts_exist(folder: Path, parts: tuple[str, ...], pipeline: str) -> None:
    """ValueError for a folder that lacks one of the parts."""
    for part in parts:
        if not (folder / part).is_dir():
            raise ValueError(
                f"model.base: {folder} is not a {pipeline} pipeline folder, {part}/ is missing"
            )


def load_part(kind: Any, folder: Path, **options: Any) -> Any:
    """`kind.from_pretrained` of a local folder; ValueError names the folder and the cause."""
    try:
        return kind.from_pretrained(folder, local_files_only=True, **options)
    except Exception as error:
        cause = " ".join(str(error).split())
        raise ValueError(f"model.base: {folder} cannot be loaded: {cause:.300}") from error


def load_encoder(kind: Any, folder: Path, dtype: torch.dtype, device: torch.device | str) -> Any:
    """A frozen text encoder with all its weights."""
    model, report = load_part(kind, folder, dtype=dtype, output_loading_info=True)
    if missing := sorted(report["missing_keys"]):
        # transformers would fill them with random numbers.
        raise ValueError(
            f"model.base: {folder} misses {len(missing)} of the text encoder's "
            f"tensors, such as {missing[0]}"
        )
    return model.to(device).eval().requires_grad_(False)


def check_tokenizer(folder: Path, tokenizer: Any, config: Any) -> None:
    """ValueError for files that are missing, out of which transformers makes an empty tokenizer."""
    known, needed = len(tokenizer), config.vocab_size
    # T5's table is padded by 28 rows.
    if not 0.9 * needed <= known <= needed:
        raise ValueError(
            f"model.base: {folder} has {known} tokens, its text encoder {needed}: files of the "
            "tokenizer are missing, or of another model"
        )
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and tokenizer.model_max_length > positions:
        raise ValueError(
            f"model.base: {folder} sets no model_max_length up to {positions}, which its text "
            "encoder can take at most; is tokenizer_config.json missing?"
        )
