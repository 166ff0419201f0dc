# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""VideoReward's checkpoint as upstream's code writes it: a PEFT model's whole state.

`checkpoint-N/model.pth` holds Qwen2-VL under the names of transformers 4.45 behind
`base_model.model.`, with low-rank adapters beside the layers they adapt. They are merged here.
"""

import math
import re
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_leangrpo.rewards.weights import find_file, open_tensors

PREFIX = "base_model.model."
_OLD_TEXT = re.compile(r"model\.(layers|embed_tokens|norm)\.")


def newest_checkpoint(reward: str, folder: Path) -> Path:
    """The weights in the folder `checkpoint-N` of the largest N."""
    numbered = [
        (int(path.name.removeprefix("checkpoint-")), path)
        for path in folder.glob("checkpoint-*")
        if path.name.removeprefix("checkpoint-").isdigit()
    ]
    if not numbered:
        raise ValueError(f"reward {reward!r}: there is no checkpoint-N in {str(folder)!r}")
    return find_file(reward, max(numbered)[1], "model.pth", "model.safetensors")


def current_name(name: str) -> str:
    """The name of a tensor in today's transformers, without PEFT's wrapping."""
    name = name.removeprefix(PREFIX)
    for part in (".base_layer", ".modules_to_save.default"):
        name = name.replace(part, "")
    if name.startswith("visual."):
        return f"model.{name}"
    return _OLD_TEXT.sub(r"model.language_model.\1.", name) if _OLD_TEXT.match(name) else name


def read_weights(reward: str, file: Path, lora: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a checkpoint with its adapters merged, in float32."""
    weights: dict[str, Tensor] = {}
    low: dict[str, dict[str, Tensor]] = {}
    for name, tensor in open_tensors(reward, file).items():
        if ".original_module." in name:
            continue
        base, adapter, rest = name.partition(".lora_")
        if not adapter:
            weights[current_name(name)] = tensor.float()
        elif rest in ("A.default.weight", "B.default.weight"):
            low.setdefault(current_name(f"{base}.weight"), {})[rest[0]] = tensor.float()
        else:
            raise ValueError(f"reward {reward!r}: {file} has {name}, an adapter of unknown form")
    if low:
        rank, alpha = lora.get("lora_r"), lora.get("lora_alpha")
        if not rank or not alpha:
            raise ValueError(
                f"reward {reward!r}: {file} has adapters and model_config.json no lora_r and "
                "lora_alpha in peft_lora_config"
            )
        scale = alpha / (math.sqrt(rank) if lora.get("use_rslora") else rank)
        for name, pair in low.items():
            if set(pair) != {"A", "B"} or name not in weights:
                raise ValueError(f"reward {reward!r}: {file} has half an adapter for {name}")
            weights[name] = weights[name] + scale * (pair["B"] @ pair["A"])
    return weights
