# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What people hand to `import`: other names, other sizes, broken folders, other files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_leangrpo.models.flux.config import to_diffusers_config
from megatron_leangrpo.models.loading import INDEX, WEIGHTS
from tests.checkpoints_tools import published
from tests.models import wan_parity
from tests.models.flux_parity import diffusers_model, small_config


@pytest.fixture
def imports_as(tools, tmp_path):
    """`imports_as(path, expected)`: import, export, and compare bit by bit; returns the output."""

    def check(path: Path, expected: published.Tensors) -> str:
        outcome = tools("import", "--model", "flux", "--input", path, "--output", tmp_path / "m")
        assert outcome.status == 0, outcome
        exported = tools("export", "--input", tmp_path / "m", "--output", tmp_path / "out")
        assert exported.status == 0, exported
        assert published.same(published.read_folder(tmp_path / "out"), expected)
        return outcome.out

    return check


@pytest.fixture
def refused(refuses, tmp_path):
    """`refused(path, parts)`: import says no with all parts, and leaves nothing behind."""

    def check(path: Path, *parts: str, model: str = "flux") -> None:
        output = tmp_path / "refused"
        refuses(list(parts), "import", "--model", model, "--input", path, "--output", output)
        assert not [p for p in tmp_path.iterdir() if "refused" in p.name]

    return check


def _edit(folder: Path, change) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def test_shards_are_read_through_their_index_alone(imports_as, plain, flux):
    published.save_shards(plain, flux)
    # A left-over shard that no index names, with other values.
    other = {name: tensor + 1 for name, tensor in list(flux.items())[:5]}
    save_file(other, plain / f"{published.STEM}-00004-of-00004.safetensors")
    imports_as(plain, flux)


def test_a_missing_shard_is_named(refused, plain, flux):
    published.save_shards(plain, flux)
    shard = plain / f"{published.STEM}-00002-of-00003.safetensors"
    shard.unlink()
    refused(plain, f"{shard} does not exist")


def test_a_truncated_shard_is_named(refused, plain, flux):
    published.save_shards(plain, flux)
    shard = plain / f"{published.STEM}-00003-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    refused(plain, f"{shard} is truncated")


def test_an_index_that_looks_in_the_wrong_shard_is_refused(refused, plain, flux):
    weight_map = published.save_shards(plain, flux)
    name, last = next(iter(weight_map)), list(weight_map.values())[-1]
    published.write_index(plain, {**weight_map, name: last})
    refused(plain, last, f"holds no tensor {name}")


def test_an_index_cannot_lead_out_of_its_folder(refused, plain, flux):
    weight_map = published.save_shards(plain, flux)
    name = next(iter(weight_map))
    published.write_index(plain, {**weight_map, name: "../elsewhere.safetensors"})
    refused(plain, "'../elsewhere.safetensors', which is no file name")


def test_a_single_file_beside_an_old_index_is_ambiguous(refused, plain, flux):
    published.save_shards(plain, {name: tensor + 1 for name, tensor in flux.items()})
    save_file(flux, plain / WEIGHTS)
    refused(plain, f"holds both {WEIGHTS} and {INDEX}")


@pytest.mark.parametrize("kind", ["missing", "truncated", "stale"])
def test_what_is_not_imported_is_not_compared_or_listed_either(refuses, plain, flux, kind):
    published.save_shards(plain, flux)
    shard = plain / f"{published.STEM}-00002-of-00003.safetensors"
    if kind == "missing":
        shard.unlink()
    elif kind == "truncated":
        shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    else:
        save_file(flux, plain / WEIGHTS)
    part = f"holds both {WEIGHTS}" if kind == "stale" else str(shard)
    refuses([part], "inspect", plain)
    refuses([part], "verify", plain, plain)


def test_a_pipeline_folder_means_its_transformer(imports_as, plain, flux, tmp_path):
    pipeline = tmp_path / "pipeline"
    shutil.copytree(plain, pipeline / "transformer")
    (pipeline / "model_index.json").write_text("{}")
    imports_as(pipeline, flux)


ORIGINAL = ["", "model.diffusion_model.", "module._orig_mod."]


@pytest.mark.parametrize("prefix", ORIGINAL)
def test_original_files_mean_the_same_weights(imports_as, flux, tmp_path, prefix):
    original = published.flux_original(flux, small_config())
    file = tmp_path / "flux1.safetensors"
    save_file({f"{prefix}{name}": tensor for name, tensor in original.items()}, file)
    said = imports_as(file, flux)
    assert "axes_dims_rope is not in such a file" in said
    assert prefix in said
    sizes = json.loads((tmp_path / "out" / "config.json").read_text())
    expected = to_diffusers_config(small_config())
    # Neither the file nor the tensors' shapes know how the head is divided.
    assert {**sizes, "axes_dims_rope": expected["axes_dims_rope"]} == expected


def test_a_config_beside_an_original_file_wins(imports_as, flux, tmp_path):
    folder = tmp_path / "original"
    config = to_diffusers_config(small_config())
    published.save_folder(folder, published.flux_original(flux, small_config()), config)
    said = imports_as(folder, flux)
    assert "axes_dims_rope" not in said
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config


def test_other_parts_bundled_into_the_file_are_left_out_and_named(imports_as, flux, tmp_path):
    original = published.flux_original(flux, small_config())
    tensors = {f"model.diffusion_model.{name}": tensor for name, tensor in original.items()}
    tensors["vae.decoder.conv_in.weight"] = torch.zeros(8, 4, 3, 3)
    tensors["text_encoders.t5xxl.transformer.shared.weight"] = torch.zeros(11, 32)
    save_file(tensors, tmp_path / "bundled.safetensors")
    assert "left out 2 tensors of other parts" in imports_as(tmp_path / "bundled.safetensors", flux)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module."])
def test_prefixes_of_wrapped_modules_are_read_and_do_not_hide_a_mismatch(
    imports_as, refused, flux, tmp_path, prefix
):
    wrapped = {f"{prefix}{name}": tensor for name, tensor in flux.items()}
    imports_as(published.save_folder(tmp_path / "wrapped", wrapped), flux)
    for n, renamed in enumerate((f"{prefix}x_embedder.other", "x_embedder.weight_2")):
        wrong = dict(wrapped)
        wrong[renamed] = wrong.pop(f"{prefix}x_embedder.weight")
        folder = published.save_folder(tmp_path / f"wrong_{n}", wrong)
        name = renamed.removeprefix(prefix)
        refused(folder, "1 missing (x_embedder.weight)", f"1 unknown ({name})")


def _relative(**changes):
    config = small_config(**changes)
    state = {n: t.clone() for n, t in diffusers_model(config).state_dict().items()}
    return to_diffusers_config(config), state


RELATIVES = {
    "schnell": {"guidance_embeds": False},
    "pruned": {"num_double_blocks": 1, "num_single_blocks": 5},
}


@pytest.mark.parametrize("name", RELATIVES)
def test_relatives_of_flux_dev_go_through_with_their_numbers(imports_as, tmp_path, name):
    config, state = _relative(**RELATIVES[name])
    imports_as(published.save_folder(tmp_path / name, state, config), state)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config


def test_unknown_keys_and_null_channels_of_a_config_are_kept(imports_as, tmp_path):
    config, state = _relative()
    config |= {"out_channels": None, "future_option": {"a": [1]}, "_name_or_path": "elsewhere"}
    imports_as(published.save_folder(tmp_path / "extra", state, config), state)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config


def test_guidance_in_the_config_or_the_file_alone_is_refused(refused, tmp_path):
    config, state = _relative()
    bare = {name: tensor for name, tensor in state.items() if "guidance" not in name}
    lost = published.save_folder(tmp_path / "lost", state, {**config, "guidance_embeds": False})
    refused(lost, "guidance_embeds is false", "would be dropped")
    refused(published.save_folder(tmp_path / "none", bare, config), "would be random")


def test_the_inpainting_variant_is_refused_with_both_numbers(refused, tmp_path):
    config, state = _relative()
    config |= {"in_channels": 96, "out_channels": 16}
    refused(published.save_folder(tmp_path / "fill", state, config), "96", "16", "policy")


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 0},
        {"num_attention_heads": None},
        {"num_layers": "two"},
        {"attention_head_dim": -24},
        {"axes_dims_rope": [8, 8]},
        {"patch_size": 2},
    ],
    ids=str,
)
def test_a_config_that_cannot_be_is_refused(refused, plain, changes):
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps({**config, **changes}))
    refused(plain, "the configuration of", str(plain))


def test_another_family_is_refused(refused, plain, tmp_path):
    refused(plain, "--model = wan", "give --model flux", model="wan")
    config = {"_class_name": "SD3Transformer2DModel"}
    other = published.save_folder(tmp_path / "other", {"a": torch.zeros(1)}, config)
    refused(other, "SD3Transformer2DModel", "FluxTransformer2DModel", "WanTransformer3DModel")


def test_missing_unknown_and_misshapen_tensors_are_counted_in_one_line(refused, plain):
    def spoil(tensors: published.Tensors) -> None:
        for name in [name for name in tensors if "ff_context" in name]:
            tensors.pop(name)
        tensors["extra.weight"] = torch.zeros(2)
        tensors["proj_out.weight"] = torch.zeros(96, 16)

    _edit(plain, spoil)
    refused(
        plain,
        "8 missing (transformer_blocks.0.ff_context.net.0.proj.bias",
        "and 4 more",
        "1 unknown (extra.weight)",
        "1 misshapen (proj_out.weight is (96, 16) instead of (16, 96))",
    )


def test_eight_bit_weights_are_refused(refused, plain):
    narrow = torch.zeros(16, 96, dtype=torch.float8_e4m3fn)
    _edit(plain, lambda tensors: tensors.update({"proj_out.weight": narrow}))
    refused(plain, "1 in float8_e4m3fn", "proj_out.weight")


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".ckpt"])
def test_pickles_are_refused_unread(refused, tmp_path, suffix):
    folder = tmp_path / "pickled"
    folder.mkdir()
    file = folder / f"diffusion_pytorch_model{suffix}"
    torch.save({"x_embedder.weight": torch.zeros(1)}, file)
    for path in (file, folder):
        refused(path, str(file), "convert it to safetensors first")


def test_what_holds_no_weights_is_refused(refused, tmp_path, flux):
    refused(tmp_path / "nowhere", "nowhere does not exist")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", f"holds neither {WEIGHTS} nor {INDEX}")
    for name in ("a", "b"):
        save_file(flux, tmp_path / "empty" / f"{name}.safetensors")
    refused(tmp_path / "empty", "several weight files", "a.safetensors, b.safetensors")
    save_file(flux, tmp_path / "alone.safetensors")
    refused(tmp_path / "alone.safetensors", "config.json")


def test_an_original_wan_without_a_number_of_heads_is_refused(refused, tmp_path):
    from megatron_leangrpo.models.common.conversion import Converted, InMemory
    from megatron_leangrpo.models.wan.weight_map import weight_rules

    settings = wan_parity.text_to_video()
    state = InMemory(dict(wan_parity.diffusers_model(settings).state_dict()))
    ours = InMemory(dict(Converted(state, weight_rules(settings), to_ours=True)))
    there = Converted(ours, weight_rules(settings, naming="original"), to_ours=False)
    file = tmp_path / "wan.safetensors"
    save_file({name: there[name].contiguous() for name in there}, file)
    refused(file, "number of heads of width", "is not known", "config.json", model="wan")


def test_sizes_that_do_not_divide_the_heads_are_refused(refuses, plain, tmp_path):
    arguments = ["import", "--model", "flux", "--input", plain, "--output", tmp_path / "m"]
    for size, part in (("3", "valid values: 1, 2, 4"), ("0", "--tensor-model-parallel-size = 0")):
        refuses([part], *arguments, "--tensor-model-parallel-size", size)
