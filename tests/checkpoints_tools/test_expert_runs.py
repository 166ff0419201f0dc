# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Runs that train two transformers, whole or by adapters: what they export and diffusers loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoints_tools.exporting import export_weights
from megatron_leangrpo import platform
from megatron_leangrpo.checkpoint.stored import StoredTensors
from megatron_leangrpo.grpo.architecture import resolve_architecture
from megatron_leangrpo.models.common.conversion import Converted, InMemory
from megatron_leangrpo.models.common.weights import full_shapes, random_weights
from megatron_leangrpo.models.saving import save_pipeline_folders
from tests.checkpoints_tools import published
from tests.grpo import tiny

FOLDERS = ("transformer", "transformer_2")
FILE = "pytorch_lora_weights.safetensors"
RANK, ALPHA = 4, 8.0


def _train(folder: Path, **sections: Any) -> Any:
    """Two iterations in `folder / "run"`; returns the configuration."""
    common = {
        "model": {"preset": "wan_smallest_experts"},
        "sampling": {"num_steps": 4},
        "grpo": {"iterations": 2, "group_size": 2, "micro_batch_size": 2},
        "optimizer": {"ema_decay": 0.5, "ema_interval": 1, "lr": 1e-2},
        "checkpoint": {"interval": 0, "export_interval": 1},
    }
    prompts = tiny.write_prompts(folder)
    config = tiny.tiny_config(prompts, **tiny.merged(tiny.WAN, common, sections))
    tiny.train_command(tiny.write_recipe(config, folder), [f"--output={folder / 'run'}"])
    platform.destroy_distributed()
    return config


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, Any]:
    """A run that trains all weights, and its configuration."""
    folder = tmp_path_factory.mktemp("whole")
    return folder / "run", _train(folder)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory) -> Path:
    """A run that trains adapters, and beside it its base and what is made of it."""
    folder = tmp_path_factory.mktemp("adapted")
    config = _train(folder, lora={"rank": RANK, "alpha": ALPHA})
    architecture = resolve_architecture(config)
    shapes = full_shapes(architecture.on_meta, architecture.weight_rules)
    base = InMemory(dict(random_weights(shapes, architecture.seed).items()))
    to_config = architecture.family.to_diffusers_config
    save_pipeline_folders(folder / "base", to_config(architecture.config), base, FOLDERS)
    export_weights(str(folder / "run"), str(folder / "lora"), False, 10**9)
    export_weights(str(folder / "run"), str(folder / "merged"), False, 10**9, merged=True)
    return folder / "run"


@pytest.mark.parametrize("average", [False, True])
def test_both_transformers_of_a_run_are_exported(whole, tmp_path, average):
    run, config = whole
    export_weights(str(run), str(tmp_path / "out"), average, 10**9)
    rules = resolve_architecture(config).weight_rules
    stored = StoredTensors(run / "checkpoints" / "step_000002", average)
    expected = dict(Converted(stored, rules, to_ours=False))
    found = {
        f"{folder}.{name}": tensor
        for folder in FOLDERS
        for name, tensor in published.read_folder(tmp_path / "out" / folder).items()
    }
    assert published.same(found, expected)
    # Trained apart: neither is the other, nor where it was.
    base = random_weights({n: t.shape for n, t in expected.items()}, config.seed)
    for folder in FOLDERS:
        name = f"{folder}.proj_out.weight"
        assert not torch.equal(found[name], base[name])


def test_a_run_exports_both_while_it_trains(whole, tools):
    from diffusers import WanTransformer3DModel

    run, _ = whole
    steps = sorted((run / "export").iterdir())
    assert [path.name for path in steps] == ["step_000001", "step_000002"]
    assert sorted(p.name for p in steps[1].iterdir()) == ["README.md", *FOLDERS]
    # What its evaluations judge: the average.
    assert tools("verify", run, steps[1], "--average").status == 0
    outcome = tools("verify", *steps)
    assert outcome.status == 1, outcome
    card = (steps[1] / "README.md").read_text()
    for folder in FOLDERS:
        assert f'{folder} = WanTransformer3DModel.from_pretrained("EXPORT", subfolder=' in card
        model = WanTransformer3DModel.from_pretrained(steps[1], subfolder=folder)
        assert published.same(dict(model.state_dict()), published.read_folder(steps[1] / folder))


def test_a_pipeline_loads_each_ones_adapters_at_the_trained_strength(adapted):
    from diffusers import WanPipeline, WanTransformer3DModel

    base, lora, merged = (adapted.parent / name for name in ("base", "lora", "merged"))
    assert sorted(p.name for p in lora.iterdir()) == list(FOLDERS)
    models = {f: WanTransformer3DModel.from_pretrained(base, subfolder=f) for f in FOLDERS}
    others = dict.fromkeys(["tokenizer", "text_encoder", "vae", "scheduler"])
    pipeline = WanPipeline(**others, **models, boundary_ratio=0.8)
    for folder in FOLDERS:
        tensors = load_file(lora / folder / FILE)
        assert all(t.any() for t in tensors.values()) and len(tensors) == 2 * 8
        second = {"load_into_transformer_2": True} if folder == FOLDERS[1] else {}
        pipeline.load_lora_weights(str(lora / folder), **second)
    pipeline.fuse_lora(components=list(FOLDERS))
    pipeline.unload_lora_weights()
    for folder in FOLDERS:
        actual, expected = models[folder].state_dict(), published.read_folder(merged / folder)
        start = published.read_folder(base / folder)
        assert actual.keys() == expected.keys()
        # A product and a sum in float32.
        assert all(torch.allclose(actual[n], expected[n], atol=1e-6) for n in expected)
        changed = [n for n in expected if not torch.equal(start[n], expected[n])]
        assert len(changed) == 8, changed


def test_exported_adapters_merge_into_their_base_and_are_what_the_run_has(adapted, tools):
    base, lora, merged = (adapted.parent / name for name in ("base", "lora", "merged"))
    again = adapted.parent / "again"
    outcome = tools("export", "--input", base, "--lora", lora, "--output", again)
    assert outcome.status == 0, outcome
    outcome = tools("verify", again, merged, "--forward")
    assert outcome.status == 0 and "forward of transformer_2 EQUAL" in outcome.out, outcome
    outcome = tools("verify", adapted, lora)
    assert outcome.status == 0 and "EQUAL: 16 tensors" in outcome.out, outcome
    # During training: the average.
    outcome = tools("verify", adapted, adapted / "export" / "step_000002", "--average")
    assert outcome.status == 0 and "EQUAL: 16 tensors" in outcome.out, outcome
    card = (adapted / "export" / "step_000002" / "README.md").read_text()
    assert 'load_lora_weights("EXPORT/transformer_2", load_into_transformer_2=True)' in card
    for path in (adapted, lora):
        outcome = tools("inspect", path)
        assert "16 projections, rank 4, alpha 8" in outcome.out
        assert "transformer_2.blocks.0.attn1.to_q.lora_A.weight" in outcome.out


def test_a_run_goes_on_from_exported_adapters(adapted):
    lora = adapted.parent / "lora"
    sections = {"model": {"preset": "wan_smallest_experts"}, "lora": {"path": str(lora)}}
    adaptation = resolve_architecture(
        tiny.tiny_config("none", **tiny.merged(tiny.WAN, sections))
    ).adaptation
    assert len(adaptation.projections) == 16
    for folder in FOLDERS:
        for name, tensor in load_file(lora / folder / FILE).items():
            assert torch.equal(adaptation.start[name.replace("transformer", folder, 1)], tensor)


def test_adapters_do_not_replace_the_weights_of_a_pipeline(adapted, refuses, tmp_path):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "WanPipeline"}))
    refuses(["is a pipeline, whose weights"], "export", "--input", adapted, "--output", tmp_path)
