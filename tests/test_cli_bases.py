# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Pipeline folders that are cut, incomplete or put together wrongly: refused by file and tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from megatron_leangrpo.grpo.assets import ASSETS
from tests.command_line import CommandLine
from tests.grpo import tiny


def _truncate(folder: Path) -> None:
    weights = folder / "transformer/diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def _edit_weights(
    edit: Callable[[dict], Any], file: str = "transformer/diffusion_pytorch_model.safetensors"
) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / file)
        edit(tensors)
        save_file(tensors, folder / file, metadata={"format": "pt"})

    return damage


def _edit_config(part: str, **changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / part / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return damage


BROKEN_BASES: dict[str, tuple[list[str], Callable[[Path], Any]]] = {
    "truncated weights": (["model.safetensors", "truncated"], _truncate),
    "no weights": (
        ["holds neither"],
        lambda folder: (folder / "transformer/diffusion_pytorch_model.safetensors").unlink(),
    ),
    "missing tensor": (
        ["misses 1 tensor", "proj_out.weight"],
        _edit_weights(lambda tensors: tensors.pop("proj_out.weight")),
    ),
    "extra tensor": (
        ["unknown 1 tensor", "extra.weight"],
        _edit_weights(lambda t: t.update({"extra.weight": t["proj_out.weight"] + 0})),
    ),
    "misshapen tensor": (
        ["proj_out.weight", "shape"],
        _edit_weights(lambda t: t.update({"proj_out.weight": t["proj_out.weight"][:-1] + 0})),
    ),
    "another model": (
        ["SD3Transformer2DModel", "FluxTransformer2DModel"],
        _edit_config("transformer", _class_name="SD3Transformer2DModel"),
    ),
    "guidance in the file alone": (
        ["guidance_embeds"],
        _edit_config("transformer", guidance_embeds=False),
    ),
    "another VAE": (["latent_channels", "in_channels"], _edit_config("vae", latent_channels=16)),
    "another T5": (["d_model", "joint_attention_dim"], _edit_config("text_encoder_2", d_model=96)),
    "no VAE": (["vae"], lambda folder: shutil.rmtree(folder / "vae")),
    "no CLIP": (["text_encoder"], lambda folder: shutil.rmtree(folder / "text_encoder")),
    # diffusers and transformers draw random numbers for these.
    "tensor missing in the VAE": (
        ["vae misses 1", "decoder.conv_in.bias"],
        _edit_weights(
            lambda tensors: tensors.pop("decoder.conv_in.bias"),
            "vae/diffusion_pytorch_model.safetensors",
        ),
    ),
    "tensor missing in CLIP": (
        ["text_encoder misses 1", "final_layer_norm.weight"],
        _edit_weights(
            lambda tensors: tensors.pop("final_layer_norm.weight"),
            "text_encoder/model.safetensors",
        ),
    ),
    # Out of what is left transformers makes a tokenizer without words, and no error.
    "no words": (
        ["tokenizer_2 has 4 tokens", "111"],
        lambda folder: (folder / "tokenizer_2/tokenizer.json").unlink(),
    ),
    "no length": (
        ["tokenizer", "model_max_length", "77"],
        lambda folder: (folder / "tokenizer/tokenizer_config.json").unlink(),
    ),
}


@pytest.mark.parametrize("case", BROKEN_BASES)
def test_a_broken_base_is_refused_by_file_and_tensor(leangrpo: CommandLine, tmp_path, case):
    recipe = tiny.write_recipe(tiny.tiny_config(tiny.write_prompts(tmp_path)), tmp_path)
    parts, damage = BROKEN_BASES[case]
    shutil.copytree(ASSETS / "flux_digits", "base")
    damage(Path("base"))
    arguments = ["--model.base=base", "--sampling.height=32", "--sampling.width=32"]
    leangrpo.refuses(["model.base", *parts], "train", recipe, *arguments)
