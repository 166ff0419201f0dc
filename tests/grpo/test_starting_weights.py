# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Runs that start from the weights of a checkpoint, and checkpoints that do not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from checkpoints_tools.importing import import_weights
from megatron_leangrpo import platform
from megatron_leangrpo.checkpoint.store import newest_valid
from megatron_leangrpo.checkpoint.training import load_weights
from megatron_leangrpo.models.flux.config import to_diffusers_config
from tests.checkpoints_tools import published
from tests.grpo import tiny
from tests.models.flux_parity import diffusers_model


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> str:
    return tiny.write_prompts(tmp_path_factory.mktemp("prompts"))


@pytest.fixture(scope="module")
def imported(tmp_path_factory) -> tuple[str, tiny.Tensors]:
    """An imported checkpoint of the preset's architecture, and its weights."""
    folder = tmp_path_factory.mktemp("imported")
    config = tiny.flux_smallest()
    state = {n: t.clone() for n, t in diffusers_model(config, seed=5).state_dict().items()}
    plain = published.save_folder(folder / "plain", state, to_diffusers_config(config))
    import_weights("flux", str(plain), str(folder / "megatron"), 2)
    return str(folder / "megatron"), state


def _first_weights(prompts: str, weights: str, tensor_parallel: int, **model) -> tiny.Tensors:
    config = tiny.tiny_config(
        prompts,
        model={"weights": weights, **model},
        parallel={"tensor_model_parallel_size": tensor_parallel},
    )
    return tiny.weights(tiny.start(config))


@pytest.mark.parametrize("tensor_parallel", [1, 2, 4])
def test_a_run_starts_from_an_imported_checkpoint(run_ranks, prompts, imported, tensor_parallel):
    path, state = imported
    results = run_ranks(tensor_parallel, _first_weights, prompts, path, tensor_parallel)
    assert all(published.same(weights, state) for weights in results)
    platform.destroy_distributed()


def test_weights_are_cast_to_the_dtype_of_the_run(run_ranks, prompts, imported):
    path, state = imported
    [weights] = run_ranks(1, _first_weights, prompts, path, 1, dtype="bfloat16")
    assert published.same(weights, {name: tensor.bfloat16() for name, tensor in state.items()})
    platform.destroy_distributed()


@pytest.fixture(scope="module")
def run(prompts, tmp_path_factory) -> Path:
    """A run of one iteration."""
    folder = tmp_path_factory.mktemp("run")
    config = tiny.tiny_config(prompts, grpo={"iterations": 1}, checkpoint={"interval": 1})
    tiny.train_command(tiny.write_recipe(config, folder), [f"--output={folder / 'run'}"])
    platform.destroy_distributed()
    return folder / "run"


def test_a_run_starts_from_the_checkpoint_of_another(run_ranks, prompts, run):
    checkpoint = newest_valid(run / "checkpoints").checkpoint
    [weights] = run_ranks(1, _first_weights, prompts, str(checkpoint), 1)
    experiment = tiny.start(tiny.tiny_config(prompts))
    started = tiny.weights(experiment)
    load_weights(checkpoint, experiment.policy.model, average=False)
    assert published.same(weights, tiny.weights(experiment))
    assert not published.same(weights, started)
    platform.destroy_distributed()


@pytest.fixture
def refuses(leangrpo, prompts, tmp_path):
    """`refuses(weights, parts)`: training and its dry run say no in one line."""

    def check(weights: object, *parts: str, dry: bool = True) -> None:
        config = tiny.tiny_config(prompts, model={"weights": str(weights)})
        recipe = tiny.write_recipe(config, tmp_path)
        for options in ([], ["--dry-run"])[: 1 + dry]:
            leangrpo.refuses(list(parts), "train", recipe, *options)

    return check


def test_what_is_no_checkpoint_is_refused(refuses, run, tmp_path):
    refuses(tmp_path / "nowhere", "model.weights", "does not exist", "checkpoints_tools import")
    refuses(tmp_path, "is no checkpoint (no manifest.json in it)")
    refuses(run, "is a run; give one of its checkpoints: step_000001")


def test_another_model_is_refused_by_name_and_number(refuses, imported, tmp_path):
    copy = Path(shutil.copytree(imported[0], tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "num_attention_heads": 2}))
    refuses(copy, "another model", "hidden_size 16 instead of 32")
    changed = {"_class_name": "WanTransformer3DModel"}
    (copy / "config.json").write_text(json.dumps(changed))
    refuses(copy, "holds a WanTransformer3DModel; this run needs a FluxTransformer2DModel")
    # A checkpoint of a run says nothing about its model but its tensors.
    (copy / "config.json").unlink()
    larger = tiny.flux_smallest(num_single_blocks=2)
    state = {n: t.clone() for n, t in diffusers_model(larger).state_dict().items()}
    plain = published.save_folder(tmp_path / "plain", state, to_diffusers_config(larger))
    import_weights("flux", str(plain), str(tmp_path / "larger"))
    (tmp_path / "larger" / "config.json").unlink()
    refuses(tmp_path / "larger", "weights of another model", "is unknown", "and 8 more")


def test_a_damaged_checkpoint_is_refused(refuses, imported, tmp_path):
    copy = Path(shutil.copytree(imported[0], tmp_path / "copy"))
    file = copy / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    # A dry run reads no weights.
    refuses(copy, "is damaged: the content of __1_0.distcp", dry=False)


def test_the_weights_of_the_base_need_not_be_there(run_ranks, prompts, imported, tmp_path):
    """The base then gives its configuration and its other parts."""
    from megatron_leangrpo.grpo.architecture import resolve_architecture

    path, state = imported
    folder = tmp_path / "base" / "transformer"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(to_diffusers_config(tiny.flux_smallest())))
    base = {"base": str(tmp_path / "base"), "preset": None}
    config = tiny.tiny_config(prompts, model={"weights": path, **base})
    platform.initialize_distributed(1)
    model = resolve_architecture(config).build_model(torch.device("cpu"))
    from megatron_leangrpo.models.flux.weight_map import export_diffusers_state_dict

    assert published.same(export_diffusers_state_dict(model), state)
    platform.destroy_distributed()
