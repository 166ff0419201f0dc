# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Transformer folders as diffusers writes them, and the ways in which they are wrong."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_leangrpo.models.flux.config import from_diffusers_config, to_diffusers_config
from megatron_leangrpo.models.flux.model import FluxTransformer
from megatron_leangrpo.models.flux.weight_map import (
    export_diffusers_state_dict,
    load_diffusers_state_dict,
)
from megatron_leangrpo.models.loading import (
    INDEX,
    WEIGHTS,
    load_transformer_folder,
    read_transformer_config,
)
from megatron_leangrpo.models.saving import save_transformer_folder
from tests.models.flux_parity import diffusers_model, small_config


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "transformer"
    diffusers_model(small_config()).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "transformer")


def _edit(folder, change) -> None:
    """Rewrite the weight file after `change(tensors)`."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def _configure(folder, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def _load(folder) -> torch.nn.Module:
    config, tensors = load_transformer_folder(folder)
    model = FluxTransformer(from_diffusers_config(config))
    load_diffusers_state_dict(model, tensors)
    return model


def _shard(folder) -> dict[str, str]:
    """Split the weight file into two shards with an index; returns the weight map."""
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    files = [f"{WEIGHTS.removesuffix('.safetensors')}-0000{n}-of-00002.safetensors" for n in (1, 2)]
    weight_map = {}
    for file, part in zip(files, (names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def test_single_and_sharded_folders_load_and_save_bit_for_bit(folder, tmp_path):
    original = load_file(folder / WEIGHTS)
    _shard(folder)
    model = _load(folder)
    exported = export_diffusers_state_dict(model)
    # Saving over the shards must not leave them for the next reader.
    save_transformer_folder(folder, to_diffusers_config(model.flux_config), exported)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", WEIGHTS]
    again = load_file(folder / WEIGHTS)
    assert again.keys() == original.keys()
    assert all(torch.equal(again[name], original[name]) for name in original)


def test_diffusers_reads_what_we_save(folder):
    from diffusers import FluxTransformer2DModel

    model = _load(folder)
    original = load_file(folder / WEIGHTS)
    save_transformer_folder(
        folder,
        to_diffusers_config(model.flux_config),
        export_diffusers_state_dict(model, dtype=torch.bfloat16),
    )
    theirs = FluxTransformer2DModel.from_pretrained(folder, torch_dtype=torch.bfloat16)
    assert all(
        torch.equal(t, original[n].to(torch.bfloat16)) for n, t in theirs.state_dict().items()
    )
    assert theirs.config.guidance_embeds is True


def test_variants_of_flux_load(folder, tmp_path):
    _configure(folder, out_channels=None, some_future_option={"a": [1]})
    assert _load(folder).flux_config.out_channels == 16
    schnell = tmp_path / "schnell"
    diffusers_model(small_config(guidance_embeds=False, num_double_blocks=1)).save_pretrained(
        schnell
    )
    model = _load(schnell)
    assert not model.flux_config.guidance_embeds
    assert to_diffusers_config(model.flux_config)["guidance_embeds"] is False


def test_names_of_a_compiled_or_data_parallel_module_are_read_without_their_prefix(folder):
    original = load_file(folder / WEIGHTS)
    save_file({f"module._orig_mod.{n}": t for n, t in original.items()}, folder / WEIGHTS)
    exported = export_diffusers_state_dict(_load(folder))
    assert all(torch.equal(exported[name], original[name]) for name in original)
    # One name without the prefix is a mismatch that must not be hidden.
    _edit(folder, lambda tensors: tensors.update(stray=torch.zeros(1)))
    with pytest.raises(ValueError, match=r"says guidance_embeds is true"):
        _load(folder)


def test_missing_folder_and_missing_weights_are_named(folder, tmp_path):
    with pytest.raises(ValueError, match=r"model\.base: .*nowhere/config\.json does not exist"):
        read_transformer_config(tmp_path / "nowhere")
    (folder / WEIGHTS).unlink()
    with pytest.raises(ValueError, match="holds neither"):
        load_transformer_folder(folder)


def test_unreadable_config_and_other_class_are_refused(folder):
    _configure(folder, _class_name="WanTransformer3DModel")
    with pytest.raises(ValueError, match=r"describes a WanTransformer3DModel; .*needs a Flux"):
        load_transformer_folder(folder)
    (folder / "config.json").write_bytes(b'{"_class_name": "\xff')
    with pytest.raises(ValueError, match=r"config\.json is no readable JSON"):
        load_transformer_folder(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="no JSON object"):
        load_transformer_folder(folder)


def test_truncated_file_is_named(folder):
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=rf"{WEIGHTS} is truncated"):
        load_transformer_folder(folder)


def test_missing_unknown_and_misshapen_tensors_are_refused_and_counted(folder):
    _edit(folder, lambda tensors: [tensors.pop(n) for n in list(tensors) if "ff_context" in n])
    with pytest.raises(
        ValueError, match=r"misses 8 tensors: transformer_blocks\.0\.ff_.* and 4 more"
    ):
        _load(folder)


def test_unknown_tensor_is_refused_before_any_weight_changes(folder):
    model = _load(folder)
    before = export_diffusers_state_dict(model)
    tensors = {name: tensor + 1 for name, tensor in load_file(folder / WEIGHTS).items()}
    with pytest.raises(ValueError, match=r"has unknown 1 tensor: extra\.weight"):
        load_diffusers_state_dict(model, {**tensors, "extra.weight": torch.zeros(2)})
    after = export_diffusers_state_dict(model)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_misshapen_tensor_is_refused_with_both_shapes(folder):
    _edit(folder, lambda tensors: tensors.update({"proj_out.weight": torch.zeros(96, 16)}))
    with pytest.raises(ValueError, match=r"proj_out\.weight has shape \(96, 16\).*\(16, 96\)"):
        _load(folder)


@pytest.mark.parametrize("claimed", [True, False])
def test_guidance_in_the_config_and_not_in_the_file_or_the_reverse_is_refused(folder, claimed):
    _configure(folder, guidance_embeds=claimed)
    if claimed:
        _edit(folder, lambda tensors: [tensors.pop(n) for n in list(tensors) if "guidance" in n])
    with pytest.raises(ValueError, match=f"guidance_embeds is {str(claimed).lower()}"):
        load_transformer_folder(folder)


def test_inpainting_variant_is_refused_with_both_channel_counts(folder):
    _configure(folder, in_channels=96, out_channels=16)
    with pytest.raises(ValueError, match="in_channels is 96 and out_channels 16"):
        from_diffusers_config(read_transformer_config(folder))


def test_wrong_shards_are_refused_by_name_and_a_stray_one_is_ignored(folder):
    weight_map = _shard(folder)
    stray = f"{WEIGHTS.removesuffix('.safetensors')}-00003-of-00003.safetensors"
    save_file({"proj_out.weight": torch.zeros(1)}, folder / stray)
    _load(folder)

    name, file = next(iter(weight_map.items()))
    other = next(f for f in weight_map.values() if f != file)
    (folder / INDEX).write_text(json.dumps({"weight_map": {**weight_map, name: other}}))
    with pytest.raises(ValueError, match=rf"{other} holds no tensor {name}"):
        load_transformer_folder(folder)

    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (folder / other).unlink()
    with pytest.raises(ValueError, match=rf"{other} does not exist"):
        load_transformer_folder(folder)

    (folder / WEIGHTS).write_bytes((folder / file).read_bytes())
    with pytest.raises(ValueError, match="holds both"):
        load_transformer_folder(folder)
