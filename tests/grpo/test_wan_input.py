# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Videos, experts and pipelines that cannot be: one line, exit status 2, nothing loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_leangrpo.config_reader import read_config, read_recipe
from megatron_leangrpo.grpo.architecture import resolve_architecture
from megatron_leangrpo.grpo.assets import ASSETS
from megatron_leangrpo.models.common.weights import full_tensors
from megatron_leangrpo.models.loading import WeightFiles

SMALL, BOTH = "wan21_1.3b_flowgrpo", "wan22_a14b"


@pytest.mark.parametrize(
    ("recipe", "arguments", "parts"),
    [
        (SMALL, ["--sampling.num_frames=32"], ["num_frames = 32", "29 or 33"]),
        (SMALL, ["--sampling.height=250"], ["sampling.height=250", "240 or 256"]),
        ("wan22_5b", ["--sampling.width=1296"], ["multiple of 32", "1280 or 1312"]),
        (
            SMALL,
            ["--parallel.tensor_model_parallel_size=8"],
            ["12 attention heads", "1, 2, 3, 4, 6, 12"],
        ),
        (BOTH, ["--model.expert_boundary=1.5"], ["model.expert_boundary = 1.5", "between 0 and 1"]),
        (BOTH, ["--model.expert_boundary=-0.1"], ["model.expert_boundary = -0.1", "0 and 1"]),
        (SMALL, ["--model.expert_boundary=0.9"], ["expert_boundary = 0.9", "one transformer"]),
        (SMALL, ["--model.expert_offload=true"], ["expert_offload = True", "one transformer"]),
        (SMALL, ["--sampling.cfg_scale_2=3"], ["sampling.cfg_scale_2 = 3.0", "one transformer"]),
        (BOTH, ["--sampling.cfg_scale=1"], ["sampling.cfg_scale_2 = 3.0", "no guidance at high"]),
        (BOTH, ["--sampling.cfg_scale_2=0.5"], ["cfg_scale_2 = 0.5", "1 or more"]),
        (
            BOTH,
            ["--model.base=wan_motion", "--parallel.tensor_model_parallel_size=2"],
            ["wan_motion has one transformer", "transformer_2"],
        ),
        (SMALL, ["--model.preset=wan21_i2v_14b"], ["image-to-video", "text-to-video"]),
        (SMALL, ["--sampling.noise_level=0.7"], ["noise_level=0.7", "kernel wan_sde"]),
        ("flux_bench", ["--sampling.num_frames=5"], ["num_frames = 5", "makes pictures"]),
    ],
)
def test_it_is_refused_in_one_line(leangrpo, recipe, arguments, parts):
    leangrpo.refuses(parts, "train", recipe, "--dry-run", *arguments)


@pytest.fixture
def pipeline(tmp_path) -> Path:
    """The embedded base with the second transformer of an A14B, which differs in one weight."""
    folder = tmp_path / "pipeline"
    shutil.copytree(ASSETS / "wan_motion", folder)
    shutil.copytree(folder / "transformer", folder / "transformer_2")
    change(folder / "model_index.json", boundary_ratio=0.9, transformer_2=["diffusers", "Wan"])
    return folder


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_both_transformers_and_their_boundary_are_read(pipeline, single_process):
    from safetensors.torch import load_file, save_file

    file = pipeline / "transformer_2" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    weights["proj_out.bias"] = weights["proj_out.bias"] + 1
    save_file(weights, file)
    config = read_config(read_recipe("wan_tiny"), [f"--model.base={pipeline}"])
    architecture = resolve_architecture(config)
    assert architecture.config.expert_boundary == 0.9
    model = architecture.build_model(torch.device("cpu"))
    found = full_tensors(model, architecture.weight_rules)
    for folder in ("transformer", "transformer_2"):
        for name, tensor in WeightFiles(pipeline / folder).items():
            assert torch.equal(found[f"{folder}.{name}"], tensor.float()), name
    overridden = read_config(
        read_recipe("wan_tiny"), [f"--model.base={pipeline}", "--model.expert_boundary=0.5"]
    )
    assert resolve_architecture(overridden).config.expert_boundary == 0.5


def _drop_boundary(folder: Path) -> None:
    change(folder / "model_index.json", boundary_ratio=None)


def _drop_folder(folder: Path) -> None:
    shutil.rmtree(folder / "transformer_2")


def _another_size(folder: Path) -> None:
    change(folder / "transformer_2" / "config.json", ffn_dim=128)


def _another_vae(folder: Path) -> None:
    change(folder / "vae" / "config.json", z_dim=16)


def _another_encoder(folder: Path) -> None:
    change(folder / "text_encoder" / "config.json", d_model=32)


@pytest.mark.parametrize(
    ("spoil", "parts"),
    [
        (_drop_boundary, ["model.expert_boundary is not set", "0.875"]),
        (_drop_folder, ["transformer_2", "does not exist"]),
        (_another_size, ["differ in their config.json", "one architecture"]),
        (_another_vae, ["z_dim is 16", "out_channels 4"]),
        (_another_encoder, ["d_model is 32", "joint_attention_dim 64"]),
    ],
)
def test_a_pipeline_that_does_not_fit_together_is_refused(leangrpo, pipeline, spoil, parts):
    spoil(pipeline)
    leangrpo.refuses(parts, "train", "wan_tiny", "--dry-run", f"--model.base={pipeline}")


def test_a_boundary_without_a_second_transformer_means_nothing(pipeline):
    """diffusers' own converter writes one for Wan 2.1."""
    change(pipeline / "model_index.json", transformer_2=[None, None])
    config = read_config(read_recipe("wan_tiny"), [f"--model.base={pipeline}"])
    assert resolve_architecture(config).config.experts == 1
