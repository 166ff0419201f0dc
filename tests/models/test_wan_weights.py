# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Wan's weights between published names and sharded parameters, counts, and checkpoints."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from megatron_leangrpo import platform
from megatron_leangrpo.models.common.weights import (
    full_tensors,
    initialise,
    load_full_tensors,
    shard_dim,
    sharded_parameters,
)
from megatron_leangrpo.models.families import model_family
from megatron_leangrpo.models.wan.config import PRESETS, wan_tiny
from megatron_leangrpo.models.wan.model import WanTransformer
from megatron_leangrpo.models.wan.shape import count_parameters, wan_shape
from megatron_leangrpo.models.wan.weight_map import weight_rules
from tests.models.wan_parity import diffusers_model, image_to_video, load, text_to_video

Tensors = dict[str, torch.Tensor]


def _model(tensor_parallel: int, make_config=image_to_video) -> WanTransformer:
    platform.initialize_distributed(tensor_parallel)
    return WanTransformer(make_config(tensor_model_parallel_size=tensor_parallel))


def _published(config=None) -> Tensors:
    model = diffusers_model(config or image_to_video())
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def _original_names(tensors: Tensors) -> Tensors:
    """The same tensors under the authors' names, by the table under test."""
    model = _model(1)
    load(model, tensors)
    return full_tensors(model, weight_rules(model.wan_config, "original"))


def _same(actual: Tensors, expected: Tensors) -> bool:
    return actual.keys() == expected.keys() and all(
        torch.equal(actual[name], expected[name]) for name in expected
    )


@pytest.mark.parametrize("naming", ["diffusers", "original"])
@pytest.mark.parametrize("make_config", [text_to_video, image_to_video])
def test_every_name_is_used_exactly_once_on_both_sides(single_process, make_config, naming):
    rules = weight_rules(make_config(), naming)
    theirs = Counter(name for rule in rules for name in rule.theirs)
    ours = Counter(name for rule in rules for name in rule.ours)
    assert set(theirs.values()) == set(ours.values()) == {1}
    assert ours.keys() == dict(_model(1, make_config).named_parameters()).keys()
    if naming == "diffusers":
        assert theirs.keys() == _published(make_config()).keys()


def test_original_names_are_those_that_diffusers_converts(single_process):
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    published = _published()
    original = _original_names(published)
    assert {"head.head.weight", "blocks.1.cross_attn.k_img.bias"} < original.keys()
    assert _same(convert_wan_transformer_to_diffusers(original), published)


def _round_trips(tensor_parallel: int, published: dict[str, Tensors]) -> dict[str, Tensors]:
    exported = {}
    for naming, tensors in published.items():
        model = _model(tensor_parallel)
        rules = weight_rules(model.wan_config, naming)
        load_full_tensors(model, rules, tensors)
        exported[naming] = full_tensors(model, rules)
    return exported


@pytest.mark.parametrize("tensor_parallel", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_round_trip_is_bitwise_on_every_rank(run_ranks, tensor_parallel):
    platform.initialize_distributed(1)
    diffusers = _published()
    published = {"diffusers": diffusers, "original": _original_names(diffusers)}
    for exported in run_ranks(tensor_parallel, _round_trips, tensor_parallel, published):
        assert all(_same(exported[naming], published[naming]) for naming in published)


def _initialised(tensor_parallel: int, seed: int) -> Tensors:
    model = _model(tensor_parallel)
    rules = weight_rules(model.wan_config)
    initialise(model, rules, seed)
    return full_tensors(model, rules)


def test_random_weights_depend_on_the_seed_and_not_on_the_layout(run_ranks):
    alone = run_ranks(1, _initialised, 1, 7)[0]
    assert all(_same(other, alone) for other in run_ranks(2, _initialised, 2, 7))
    assert not _same(run_ranks(1, _initialised, 1, 8)[0], alone)
    assert alone["blocks.0.norm2.weight"].eq(1).all()
    assert alone["blocks.0.norm2.bias"].eq(0).all()
    # 8 channels of 2 x 2: uniform below 1 / sqrt(32), whose deviation is 1 / sqrt(3) of that.
    patch = alone["patch_embedding.weight"]
    assert patch.abs().max() <= 32**-0.5 and patch.std() > 0.5 * 32**-0.5
    # 6 x 64 normal numbers.
    assert alone["blocks.0.scale_shift_table"].std().item() == pytest.approx(64**-0.5, rel=0.2)


def _save(tensor_parallel: int, weights: Tensors, folder: str) -> None:
    from megatron.core import dist_checkpointing

    model = _model(tensor_parallel)
    load(model, weights)
    with platform.host_mode():
        dist_checkpointing.save({"model": sharded_parameters(model)}, folder)


def _restore(tensor_parallel: int, folder: str) -> Tensors:
    from megatron.core import dist_checkpointing

    model = _model(tensor_parallel)
    with platform.host_mode():
        loaded = dist_checkpointing.load({"model": sharded_parameters(model)}, folder)
    model.load_state_dict(loaded["model"])
    return full_tensors(model, weight_rules(model.wan_config))


# What runs save at one layout and load at another is in tests/checkpoint.
@pytest.mark.slow
def test_checkpoint_loads_at_another_tensor_parallel_size(run_ranks, tmp_path: Path):
    weights = _published()
    run_ranks(2, _save, 2, weights, str(tmp_path))
    for exported in run_ranks(4, _restore, 4, str(tmp_path)):
        assert _same(exported, weights)


@pytest.mark.parametrize(
    ("preset", "parameters", "tensors"),
    [
        ("wan21_1.3b", 1_418_996_800, 825),
        ("wan21_14b", 14_288_491_584, 1095),
        ("wan21_i2v_14b", 16_394_878_784, 1303),
        ("wan22_a14b", 14_288_491_584, 1095),
        ("wan22_5b", 4_999_787_712, 825),
    ],
)
def test_models_have_the_published_sizes(single_process, preset, parameters, tensors):
    config = PRESETS[preset]()
    with torch.device("meta"):
        model = model_family("wan").build(config)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert parameters * config.experts == count_parameters(config)
    assert sum(len(rule.theirs) for rule in weight_rules(config)) == tensors
    sharded = sum(p.numel() for p in model.parameters() if shard_dim(p) is not None)
    assert sharded == wan_shape(config, video_tokens=1, text_tokens=1).sharded_parameters


def test_two_experts_are_two_folders():
    assert PRESETS["wan22_a14b"]().transformer_folders == ("transformer", "transformer_2")
    assert wan_tiny().transformer_folders == ("transformer",)
