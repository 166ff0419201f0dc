# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Adapters of a run and LoRA files: exported, merged, compared and listed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from checkpoints_tools.exporting import export_weights
from megatron_leangrpo import platform
from megatron_leangrpo.grpo.architecture import resolve_architecture
from megatron_leangrpo.models.common.weights import full_shapes, random_weights
from megatron_leangrpo.models.saving import save_transformer_folder
from tests.checkpoints_tools import published
from tests.grpo import tiny

RANK, ALPHA = 4, 8.0


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Two iterations on adapters whose alpha is not their rank, averaged and saved; its base."""
    folder = tmp_path_factory.mktemp("adapters")
    config = tiny.tiny_config(
        tiny.write_prompts(folder),
        lora={"rank": RANK, "alpha": ALPHA},
        grpo={"iterations": 2, "group_size": 2, "micro_batch_size": 2},
        optimizer={"ema_decay": 0.5, "ema_interval": 1},
        checkpoint={"interval": 2},
    )
    tiny.train_command(tiny.write_recipe(config, folder), [f"--output={folder / 'run'}"])
    architecture = resolve_architecture(config)
    shapes = full_shapes(architecture.on_meta, architecture.weight_rules)
    base = dict(random_weights(shapes, architecture.seed).items())
    to_config = architecture.family.to_diffusers_config
    save_transformer_folder(folder / "base", to_config(architecture.config), base)
    platform.destroy_distributed()
    return folder / "run"


@pytest.fixture(scope="module")
def exported(run) -> Path:
    output = run.parent / "lora"
    export_weights(str(run), str(output), False, 10**9)
    return output / "pytorch_lora_weights.safetensors"


@pytest.fixture(scope="module")
def merged(run) -> Path:
    output = run.parent / "merged"
    export_weights(str(run), str(output), False, 10**9, merged=True)
    return output


def _base_and(changes: dict[str, torch.Tensor], base: Path) -> dict[str, torch.Tensor]:
    weights = published.read_folder(base)
    return {n: w + changes[n] if n in changes else w for n, w in weights.items()}


def test_a_stranger_reads_the_trained_strength_from_the_file_alone(run, exported, merged):
    tensors = load_file(exported)
    with safe_open(exported, framework="pt") as file:
        config = json.loads(file.metadata()["lora_adapter_metadata"])
    assert config["transformer.r"] == RANK
    scale = config["transformer.lora_alpha"] / config["transformer.r"]
    modules = {re.sub(r"\.lora_[AB]\.weight$", "", name) for name in tensors}
    assert len(tensors) == 2 * len(modules) == 2 * 15
    changes = {}
    for module in modules:
        a, b = (tensors[f"{module}.lora_{letter}.weight"] for letter in "AB")
        assert b.any(), f"{module} has not been trained"
        changes[f"{module.removeprefix('transformer.')}.weight"] = scale * b @ a
    expected = _base_and(changes, run.parent / "base")
    actual = published.read_folder(merged)
    assert actual.keys() == expected.keys()
    assert all(torch.allclose(actual[n], expected[n], atol=1e-7) for n in expected)
    untouched = [name for name in expected if name not in changes]
    assert untouched and all(torch.equal(actual[n], expected[n]) for n in untouched)


def test_diffusers_fuses_the_file_into_what_we_merge(run, exported, merged):
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel.from_pretrained(run.parent / "base")
    model.load_lora_adapter(str(exported.parent), weight_name=exported.name)
    model.fuse_lora()
    model.unload_lora()
    expected = published.read_folder(merged)
    actual = model.state_dict()
    assert actual.keys() == expected.keys()
    assert all(torch.allclose(actual[n], expected[n], atol=1e-6) for n in expected)


def test_an_average_and_a_file_merged_into_a_base_are_what_they_should_be(run, tools, exported):
    out = run.parent / "again"
    base = run.parent / "base"
    outcome = tools("export", "--input", base, "--lora", exported.parent, "--output", out)
    assert outcome.status == 0, outcome
    assert tools("verify", out, run.parent / "merged").status == 0
    average = run.parent / "average"
    assert tools("export", "--input", run, "--average", "--output", average).status == 0
    assert tools("verify", average, run, "--average").status == 2
    outcome = tools("verify", run, average, "--average")
    assert outcome.status == 0 and "EQUAL: 15 tensors" in outcome.out, outcome
    assert tools("verify", run, average).status == 1


def test_adapters_are_compared_by_what_they_change(run, tools, exported, tmp_path):
    outcome = tools("verify", run, exported)
    assert outcome.status == 0 and "EQUAL: 15 tensors" in outcome.out, outcome
    # The strength inside B, and no word about it.
    tensors = load_file(exported)
    baked = {n: ALPHA / RANK * t if "lora_B" in n else t for n, t in tensors.items()}
    save_file(baked, tmp_path / "baked.safetensors")
    assert tools("verify", exported, tmp_path / "baked.safetensors").status == 0
    save_file(tensors, tmp_path / "weak.safetensors")
    outcome = tools("verify", exported, tmp_path / "weak.safetensors")
    assert outcome.status == 1 and "15 of 15 tensors differ" in outcome.out, outcome


def test_inspect_lists_adapters(run, tools, exported):
    for path, kind in ((run, "megatron, adapters alone"), (exported, "LoRA")):
        outcome = tools("inspect", path)
        assert outcome.status == 0, outcome
        assert kind in outcome.out and "15 projections, rank 4, alpha 8" in outcome.out
        assert "transformer_blocks.0.attn.to_q.lora_A.weight" in outcome.out
    described = json.loads(tools("inspect", run, "--json").out)
    assert described["step"] == 2 and described["base"] == "random weights"


def test_what_cannot_be_is_refused(run, refuses, exported, tmp_path):
    base, out = run.parent / "base", tmp_path / "out"
    refuses(["--lora", "holds adapters itself"], "export", "--input", run, "--lora", exported,
            "--output", out)  # fmt: skip
    refuses(["--merged", "give its base as --input"], "export", "--input", exported, "--merged",
            "--output", out)  # fmt: skip
    refuses(["--merged", "holds no adapters"], "export", "--input", base, "--merged",
            "--output", out)  # fmt: skip
    refuses(["adapters are compared with adapters"], "verify", exported, base)
    refuses(["adapters are compared with adapters"], "verify", exported, run, "--forward")
    other = {"transformer.x.lora_A.weight": torch.ones(2, 3)}
    other["transformer.x.lora_B.weight"] = torch.ones(3, 2)
    save_file(other, tmp_path / "other.safetensors")
    refuses(["--lora", "1 of the adapted projections", "transformer.x"], "export", "--input", base,
            "--lora", tmp_path / "other.safetensors", "--output", out)  # fmt: skip
    assert not out.exists()
