# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Weights through megatron's format and back, bit for bit, and what loads from it."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from checkpoints_tools.exporting import export_weights
from checkpoints_tools.importing import import_weights
from checkpoints_tools.opening import open_checkpoint
from megatron_leangrpo import platform
from megatron_leangrpo.checkpoint.store import damage, newest_valid
from megatron_leangrpo.checkpoint.training import load_weights
from megatron_leangrpo.models.common.conversion import Converted, InMemory
from megatron_leangrpo.models.common.weights import full_tensors
from megatron_leangrpo.models.flux.config import from_diffusers_config, to_diffusers_config
from megatron_leangrpo.models.flux.model import FluxTransformer
from megatron_leangrpo.models.flux.original import weight_rules as original_rules
from megatron_leangrpo.models.flux.weight_map import export_diffusers_state_dict
from megatron_leangrpo.models.loading import load_transformer_folder
from megatron_leangrpo.models.wan import config as wan_config
from megatron_leangrpo.models.wan.model import WanTransformer
from megatron_leangrpo.models.wan.weight_map import weight_rules as wan_rules
from tests.checkpoints_tools import published
from tests.grpo import tiny
from tests.models import wan_parity
from tests.models.flux_parity import small_config


@pytest.mark.parametrize("cut_for", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_diffusers_to_megatron_and_back_is_bit_exact(flux, tmp_path, cut_for, dtype):
    tensors = {name: tensor.to(dtype) for name, tensor in flux.items()}
    # diffusers keeps some tensors of some models in float32.
    tensors["proj_out.bias"] = tensors["proj_out.bias"].float()
    plain = published.save_folder(tmp_path / "plain", tensors)
    published.save_shards(plain, tensors)
    import_weights("flux", str(plain), str(tmp_path / "megatron"), cut_for)
    assert damage(tmp_path / "megatron") is None
    parts = sorted(p.name for p in (tmp_path / "megatron").glob("*.distcp"))
    assert parts == [f"__{part}_0.distcp" for part in range(cut_for)]
    export_weights(str(tmp_path / "megatron"), str(tmp_path / "out"), False, 10**5)
    assert published.same(published.read_folder(tmp_path / "out"), tensors)
    config = [json.loads((f / "config.json").read_text()) for f in (plain, tmp_path / "out")]
    assert config[0] == config[1]


def _load(tensor_parallel: int, folder: str, config: dict) -> dict[str, torch.Tensor]:
    platform.initialize_distributed(tensor_parallel)
    settings = from_diffusers_config(config, tensor_model_parallel_size=tensor_parallel)
    model = FluxTransformer(settings)
    load_weights(Path(folder), model, average=False)
    return export_diffusers_state_dict(model)


@pytest.mark.parametrize("tensor_parallel", [1, 2, 4])
@pytest.mark.parametrize("cut_for", [1, 2, 4])
def test_an_import_loads_at_every_tensor_parallel_size(
    run_ranks, flux, plain, tmp_path, cut_for, tensor_parallel
):
    folder = str(tmp_path / "megatron")
    config = import_weights("flux", str(plain), folder, cut_for).config
    for loaded in run_ranks(tensor_parallel, _load, tensor_parallel, folder, config):
        assert published.same(loaded, flux)


def test_bfloat16_weights_load_into_a_float32_model(run_ranks, flux, tmp_path):
    narrow = {name: tensor.bfloat16() for name, tensor in flux.items()}
    published.save_folder(tmp_path / "plain", narrow)
    folder = str(tmp_path / "megatron")
    config = import_weights("flux", str(tmp_path / "plain"), folder, 2).config
    [loaded] = run_ranks(1, _load, 1, folder, config)
    assert published.same(loaded, {name: tensor.float() for name, tensor in narrow.items()})


def test_diffusers_reads_an_export(flux, plain, tmp_path):
    from diffusers import FluxTransformer2DModel

    import_weights("flux", str(plain), str(tmp_path / "megatron"), 2)
    export_weights(str(tmp_path / "megatron"), str(tmp_path / "out"), False, 10**5)
    model = FluxTransformer2DModel.from_pretrained(tmp_path / "out")
    assert published.same(dict(model.state_dict()), flux)


def test_every_original_tensor_is_in_one_rule_and_means_the_same(flux):
    config = small_config()
    original = published.flux_original(flux, config)
    rules = original_rules(config)
    names = [name for rule in rules for name in rule.theirs]
    assert len(names) == len(set(names)) and set(names) == original.keys()
    # ... and back, which is what makes an export in that layout possible.
    ours = Converted(InMemory(original), rules, to_ours=True)
    again = Converted(InMemory(dict(ours)), rules, to_ours=False)
    assert published.same(dict(again), original)


WAN = {"t2v": wan_parity.text_to_video, "i2v": wan_parity.image_to_video}


@pytest.mark.parametrize("variant", WAN)
@pytest.mark.parametrize("naming", ["diffusers", "original"])
def test_wan_goes_through_bit_for_bit_under_both_namings(tmp_path, variant, naming):
    settings = WAN[variant]()
    state = {n: t.clone() for n, t in wan_parity.diffusers_model(settings).state_dict().items()}
    tensors, config = state, wan_config.to_diffusers_config(settings)
    if naming == "original":
        ours = dict(Converted(InMemory(state), wan_rules(settings), to_ours=True))
        there = Converted(InMemory(ours), wan_rules(settings, naming="original"), to_ours=False)
        tensors = {name: there[name].contiguous() for name in there}
        config = {"_class_name": "WanModel", "num_heads": settings.num_attention_heads}
    published.save_folder(tmp_path / "plain", tensors, config)
    import_weights("wan", str(tmp_path / "plain"), str(tmp_path / "megatron"), 2)
    export_weights(str(tmp_path / "megatron"), str(tmp_path / "out"), False, 10**4)
    assert published.same(published.read_folder(tmp_path / "out"), state)
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert wan_config.from_diffusers_config(exported) == settings


def test_a_norm_that_published_wan_files_hold_and_no_model_uses_is_left_out(tools, tmp_path):
    settings = wan_parity.image_to_video()
    state = {n: t.clone() for n, t in wan_parity.diffusers_model(settings).state_dict().items()}
    unused = {f"blocks.{n}.attn2.norm_added_q.weight": torch.ones(64) for n in range(2)}
    config = wan_config.to_diffusers_config(settings)
    plain = published.save_folder(tmp_path / "plain", state | unused, config)
    outcome = tools("import", "--model", "wan", "--input", plain, "--output", tmp_path / "megatron")
    assert outcome.status == 0, outcome
    assert "left out 2 tensors that the model never uses: blocks.0.attn2.norm" in outcome.out
    export_weights(str(tmp_path / "megatron"), str(tmp_path / "out"), False, 10**9)
    # As diffusers itself would write them after loading: without.
    assert published.same(published.read_folder(tmp_path / "out"), state)
    assert tools("verify", plain, tmp_path / "out").status == 0
    # A run reads the same folder.
    assert load_transformer_folder(plain, "WanTransformer3DModel")[1].layout.keys() == state.keys()


def _load_wan(tensor_parallel: int, folder: str, config: dict) -> dict[str, torch.Tensor]:
    platform.initialize_distributed(tensor_parallel)
    settings = wan_config.from_diffusers_config(config, tensor_model_parallel_size=tensor_parallel)
    model = WanTransformer(settings)
    load_weights(Path(folder), model, average=False)
    return full_tensors(model, wan_rules(settings))


@pytest.mark.parametrize("tensor_parallel", [1, 2, 4])
def test_an_imported_wan_loads_at_every_tensor_parallel_size(run_ranks, tmp_path, tensor_parallel):
    settings = wan_parity.image_to_video()
    state = {n: t.clone() for n, t in wan_parity.diffusers_model(settings).state_dict().items()}
    config = wan_config.to_diffusers_config(settings)
    published.save_folder(tmp_path / "plain", state, config)
    folder = str(tmp_path / "megatron")
    import_weights("wan", str(tmp_path / "plain"), folder, 2)
    for loaded in run_ranks(tensor_parallel, _load_wan, tensor_parallel, folder, config):
        assert published.same(loaded, state)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of two iterations with an average."""
    folder = tmp_path_factory.mktemp("run")
    config = tiny.tiny_config(
        tiny.write_prompts(folder),
        grpo={"iterations": 2},
        optimizer={"ema_decay": 0.5, "ema_interval": 1},
        checkpoint={"interval": 1},
    )
    tiny.train_command(tiny.write_recipe(config, folder), [f"--output={folder / 'run'}"])
    platform.destroy_distributed()
    return folder / "run"


@pytest.mark.parametrize("average", [False, True])
def test_a_checkpoint_of_a_run_is_exported_live_or_averaged(run, single_process, tmp_path, average):
    model = FluxTransformer(tiny.flux_smallest())
    load_weights(newest_valid(run / "checkpoints").checkpoint, model, average)
    expected = export_diffusers_state_dict(model)
    # The run stands for its newest checkpoint.
    exported = export_weights(str(run), str(tmp_path / "out"), average, 10**9)
    assert exported.step == 2
    assert published.same(published.read_folder(tmp_path / "out"), expected)
    assert open_checkpoint(tmp_path / "out", "A").settings == open_checkpoint(run, "B").settings


def test_live_and_average_weights_of_a_run_differ(run, tools):
    outcome = tools("verify", run, run, "--average")
    assert outcome.status == 1 and "tensors differ" in outcome.out
    assert tools("verify", run, run / "checkpoints" / "step_000002").status == 0


def test_a_flux_without_guidance_is_trained_and_exported_as_one(
    tools, tmp_path, monkeypatch, capfd
):
    without = partial(tiny.flux_smallest, guidance_embeds=False)
    monkeypatch.setitem(tiny.PRESETS, "schnell_smallest", without)
    config = tiny.tiny_config(
        tiny.write_prompts(tmp_path),
        model={"preset": "schnell_smallest", "guidance_scale": 2.0},
        grpo={"iterations": 1},
        checkpoint={"interval": 1},
    )
    run = tmp_path / "run"
    tiny.train_command(tiny.write_recipe(config, tmp_path), [f"--output={run}"])
    platform.destroy_distributed()
    assert "model.guidance_scale = 2 is ignored" in "".join(capfd.readouterr())
    assert tools("export", "--input", run, "--output", tmp_path / "out").status == 0
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert exported["guidance_embeds"] is False
    assert not any("guidance" in name for name in published.read_folder(tmp_path / "out"))


def test_the_model_of_a_run_is_found_in_its_base_or_asked_for(flux, refuses, run, tmp_path):
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    checkpoint = copy / "checkpoints" / "step_000002"
    # Older checkpoints do not say it.
    stated = (checkpoint / "config.json").read_bytes()
    (checkpoint / "config.json").unlink()
    base = tmp_path / "base"
    published.save_folder(base / "transformer", flux)
    prompts = tiny.write_prompts(tmp_path)
    config = tiny.tiny_config(prompts, model={"preset": None, "base": str(base)})
    written = Path(tiny.write_recipe(config, tmp_path))
    written.replace(copy / "config.yaml")
    # The base is another model than the one that was trained.
    refuses(["the tensors of", "are not those of its flux", "misshapen"], "inspect", checkpoint)
    shutil.rmtree(base)
    refuses(["the base of the run", str(base), "config.json into"], "inspect", checkpoint)
    (copy / "config.yaml").unlink()
    refuses(["does not say which model it is"], "inspect", checkpoint)
    (checkpoint / "config.json").write_bytes(stated)
    assert json.loads(stated) == to_diffusers_config(tiny.flux_smallest())
    assert open_checkpoint(checkpoint, "A").step == 2
