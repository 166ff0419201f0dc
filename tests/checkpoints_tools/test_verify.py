# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What `verify` notices and `inspect` shows, whatever the formats."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from checkpoints_tools.importing import import_weights
from megatron_leangrpo.models.wan.config import to_diffusers_config
from tests.checkpoints_tools import published
from tests.models import wan_parity
from tests.models.flux_parity import small_config


@pytest.fixture
def formats(flux, plain, tmp_path) -> list[Path]:
    """The same weights in the three formats."""
    original = published.save_folder(
        tmp_path / "original", published.flux_original(flux, small_config())
    )
    import_weights("flux", str(plain), str(tmp_path / "megatron"), 2)
    return [plain, original, tmp_path / "megatron"]


def test_the_same_weights_are_equal_in_all_formats(tools, formats):
    for first, second in zip(formats, formats[1:] + formats[:1]):
        outcome = tools("verify", first, second, "--forward")
        assert outcome.status == 0 and "EQUAL: 112 tensors" in outcome.out, outcome
        assert "forward EQUAL" in outcome.out


def test_differences_are_measured_and_the_worst_named_first(tools, formats, flux, tmp_path):
    changed = {name: tensor.clone() for name, tensor in flux.items()}
    changed["x_embedder.weight"] += 0.25
    changed["proj_out.bias"] *= 1.5
    other = published.save_folder(tmp_path / "other", changed)
    for path in formats:
        outcome = tools("verify", path, other, "--forward")
        assert outcome.status == 1
        assert "2 of 112 tensors differ" in outcome.out and "forward DIFFERENT" in outcome.out
        rows = [line.split() for line in outcome.out.splitlines() if line.startswith(("x_", "pro"))]
        assert rows[0][:2] == ["x_embedder.weight", "0.25"]
        # |a - 1.5 a| / |1.5 a|
        assert rows[1][0] == "proj_out.bias" and math.isclose(
            float(rows[1][2]), 1 / 3, rel_tol=0.01
        )


def test_other_names_and_shapes_are_differences(tools, plain, tmp_path):
    config = {**json.loads((plain / "config.json").read_text()), "num_single_layers": 1}
    fewer = {
        name: tensor
        for name, tensor in published.read_folder(plain).items()
        if not name.startswith("single_transformer_blocks.1")
    }
    outcome = tools("verify", plain, published.save_folder(tmp_path / "fewer", fewer, config))
    assert outcome.status == 1 and "only in A: 14" in outcome.out, outcome


def test_another_dtype_is_said_and_only_other_numbers_count(tools, flux, plain, tmp_path):
    double = {name: tensor.double() for name, tensor in flux.items()}
    outcome = tools("verify", plain, published.save_folder(tmp_path / "double", double))
    assert outcome.status == 0 and "other dtypes: 112" in outcome.out, outcome
    narrow = {name: tensor.bfloat16() for name, tensor in flux.items()}
    outcome = tools("verify", plain, published.save_folder(tmp_path / "narrow", narrow))
    assert outcome.status == 1 and "float32 and bfloat16" in outcome.out


def test_a_nan_equals_itself_and_nothing_else(tools, flux, plain, tmp_path):
    broken = dict(flux)
    broken["proj_out.bias"] = torch.full_like(flux["proj_out.bias"], torch.nan)
    folder = published.save_folder(tmp_path / "broken", broken)
    assert tools("verify", folder, folder).status == 0
    outcome = tools("verify", plain, folder)
    assert outcome.status == 1 and "inf" in outcome.out


def test_two_families_cannot_be_compared(refuses, plain, tmp_path):
    settings = wan_parity.text_to_video()
    state = {n: t.clone() for n, t in wan_parity.diffusers_model(settings).state_dict().items()}
    wan = published.save_folder(tmp_path / "wan", state, to_diffusers_config(settings))
    refuses(["A is a flux and B a wan"], "verify", plain, wan)


@pytest.mark.parametrize("variant", [wan_parity.text_to_video, wan_parity.image_to_video])
def test_wan_runs_forward_in_both_formats(tools, tmp_path, variant):
    settings = variant()
    state = {n: t.clone() for n, t in wan_parity.diffusers_model(settings).state_dict().items()}
    wan = published.save_folder(tmp_path / "wan", state, to_diffusers_config(settings))
    import_weights("wan", str(wan), str(tmp_path / "megatron"))
    outcome = tools("verify", wan, tmp_path / "megatron", "--forward")
    assert outcome.status == 0 and "forward EQUAL" in outcome.out, outcome


def test_broken_folders_are_refused_by_verify_and_inspect_alike(refuses, plain, flux):
    published.save_shards(plain, flux)
    shard = plain / f"{published.STEM}-00002-of-00003.safetensors"
    shard.unlink()
    refuses([f"{shard} does not exist"], "verify", plain, plain)
    refuses([f"{shard} does not exist"], "inspect", plain)


def test_inspect_shows_format_sizes_step_and_layout(tools, formats):
    numel = sum(t.numel() for t in published.read_folder(formats[0]).values())
    for path, name in zip(formats, ("diffusers", "original", "megatron")):
        shown = json.loads(tools("inspect", path, "--json").out)
        assert (shown["format"], shown["model"], shown["parameters"]) == (name, "flux", numel)
        assert shown["dtypes"] == {"float32": len(shown["tensors"])}
    assert shown["tensor_model_parallel_size"] == 2 and shown["step"] is None
    assert shown["tensors"]["img_in.weight"] == {"shape": [96, 16], "dtype": "float32"}
    table = tools("inspect", formats[2]).out
    assert "tensor parallel 2" in table and "img_in.weight" in table and "96 x 16" in table


def test_a_mistake_on_the_command_line_is_one_line(refuses, plain):
    refuses(["--model"], "import", "--input", plain, "--output", "x")
    refuses(["invalid choice"], "convert")
    refuses(["unrecognized arguments: --fast"], "inspect", plain, "--fast")


def test_wrapped_names_are_compared_by_what_they_mean(tools, flux, plain, tmp_path):
    wrapped = {f"_orig_mod.{name}": tensor for name, tensor in flux.items()}
    folder = published.save_folder(tmp_path / "wrapped", wrapped)
    assert tools("verify", plain, folder).status == 0
    save_file(wrapped, tmp_path / "plain" / "another.safetensors")
    assert tools("verify", plain, folder).status == 0
