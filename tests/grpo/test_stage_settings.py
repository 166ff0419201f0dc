# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What a run's settings say of pipeline stages: their blocks, their sizes, what they train."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_leangrpo.config_reader import read_config, read_recipe, write_config
from megatron_leangrpo.grpo.architecture import resolve_architecture
from megatron_leangrpo.grpo.dry_run import check_run, rank_bytes
from megatron_leangrpo.grpo.pipeline_facts import few_waves
from megatron_leangrpo.grpo.planning import all_candidates, with_stages, workload_of
from megatron_leangrpo.models.common.lora import adapter_rules
from megatron_leangrpo.models.common.weights import full_tensors
from megatron_leangrpo.models.saving import save_lora_folder
from megatron_leangrpo.planner.gpus import find_gpu, host
from megatron_leangrpo.planner.workload import Ranks
from megatron_leangrpo.preflight.recipe import memory_check
from tests.grpo import tiny


def _config(tmp_path, **sections):
    layer = {"model": {"preset": "flux_tiny"}, **sections}
    return tiny.tiny_config(tiny.write_prompts(tmp_path), **layer)


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("split", [None, [1, 3], "memory"])
def test_a_ranks_bytes_are_those_of_the_largest_stage(tmp_path, split):
    parallel = {"pipeline_model_parallel_size": 2, "pipeline_split": split}
    config = _config(tmp_path, parallel=parallel)
    architecture = resolve_architecture(config)
    with torch.device("meta"):
        stages = [
            architecture.family.build(architecture.config, architecture.config.stage(n))
            for n in range(2)
        ]
    counts = [sum(p.numel() for p in stage.parameters()) for stage in stages]
    assert sum(counts) == architecture.count_parameters()
    assert architecture.rank_parameters(1) == (max(counts), max(counts))
    assert architecture.rank_parameters(2)[0] < max(counts)
    assert rank_bytes(config, architecture, 1).weights == 4 * max(counts)


@pytest.mark.usefixtures("single_process")
def test_adapters_of_a_stage_are_counted_and_every_stage_has_one(tmp_path):
    parallel = {"pipeline_model_parallel_size": 2, "pipeline_split": [1, 3]}
    lora = {"rank": 2, "targets": ["attn.to_q", "proj_out"]}
    architecture = resolve_architecture(_config(tmp_path, parallel=parallel, lora=lora))
    # A projection of the first block against two in each of the three others.
    inputs, outputs = 96 + 96, 96 + 96 + 5 * 96 + 96
    assert architecture.rank_parameters(1)[1] == 3 * 2 * outputs > 2 * inputs
    assert architecture.adaptation.num_parameters == 2 * inputs + 3 * 2 * outputs
    assert len(architecture.adapter_rules()) == 2 * (1 + 3 * 2)

    lora["targets"] = ["add_q_proj"]
    architecture = resolve_architecture(_config(tmp_path, parallel=parallel, lora=lora))
    with pytest.raises(ValueError, match=r"blocks 1 to 3 is adapted, which are stage 2 of para"):
        architecture.adaptation  # noqa: B018 (a cached property)


@pytest.mark.usefixtures("single_process")
def test_each_stage_starts_from_its_part_of_a_lora_file(tmp_path):
    architecture = resolve_architecture(_config(tmp_path, lora={"rank": 2}))
    adapted = architecture.build_model(torch.device("cpu"))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    tensors = full_tensors(adapted, adapter_rules(adapted))
    save_lora_folder(tmp_path / "lora", architecture.adaptation.projections, tensors)
    parallel = {"pipeline_model_parallel_size": 2, "pipeline_split": [1, 3]}
    lora = {"path": str(tmp_path / "lora")}
    architecture = resolve_architecture(_config(tmp_path, lora=lora, parallel=parallel))
    expected = {n: p for n, p in adapted.named_parameters() if p.requires_grad}
    names = set()
    for number in range(2):
        stage = architecture.family.build(architecture.config, architecture.config.stage(number))
        architecture.adaptation.attach(stage, architecture.weight_rules, seed=0)
        own = {n: p for n, p in stage.named_parameters() if p.requires_grad}
        assert own and not names & own.keys()
        names |= own.keys()
        assert all(torch.equal(parameter, expected[n]) for n, parameter in own.items())
    assert names == expected.keys()


@pytest.mark.parametrize(
    ("parallel", "world", "message"),
    [
        ({"pipeline_model_parallel_size": 8}, 8, "transformer has 4 blocks .* values: 1 to 4$"),
        (
            {"pipeline_model_parallel_size": 2, "pipeline_split": [3, 3]},
            2,
            r"parallel\.pipeline_split is \[3, 3\], which adds up to 6, .* 4 blocks; .*\[2, 2\]$",
        ),
        (
            {"pipeline_model_parallel_size": 3, "tensor_model_parallel_size": 2},
            8,
            r"parallel\.pipeline_model_parallel_size is 3, which does not divide the 8 processes "
            r"of this run / parallel\.tensor_model_parallel_size = 4; valid values: 1, 2, 4$",
        ),
    ],
)
def test_a_layout_that_cannot_be_is_refused(tmp_path, parallel, world, message):
    with pytest.raises(ValueError, match=message):
        check_run(_config(tmp_path, parallel=parallel), world)


@pytest.mark.parametrize(("given", "split"), [("[1,3]", [1, 3]), ("memory", "memory")])
def test_a_split_is_read_and_written(tmp_path, given, split):
    recipe = tiny.write_recipe(_config(tmp_path), tmp_path)
    options = [f"--parallel.pipeline_split={given}", "--parallel.pipeline_model_parallel_size=2"]
    config = read_config(read_recipe(recipe), options)
    assert config.parallel.pipeline_split == split
    (tmp_path / "again.yaml").write_text(write_config(config), encoding="utf-8")
    assert read_config(read_recipe(str(tmp_path / "again.yaml")), []).parallel == config.parallel


@pytest.mark.parametrize("split", [None, [20, 20, 9, 8]])
def test_a_run_is_split_as_it_is_planned_on_any_device(tmp_path, split):
    sizes = {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 4}
    config = _config(
        tmp_path, model={"preset": "flux_dev"}, parallel={**sizes, "pipeline_split": split}
    )
    architecture = resolve_architecture(config)
    dealt = with_stages(config, architecture).config
    blocks = tuple(len(dealt.stage(n).blocks) for n in range(4))
    # Double blocks come first, and have more collectives than single ones.
    assert blocks == tuple(split) if split else blocks[0] < blocks[1] < blocks[3]
    work = workload_of(config, architecture)
    for gpu in ("h100-80gb", "l20"):
        planned = all_candidates(config, work, [Ranks(4, pipeline=4)], find_gpu(gpu))
        assert {tuple(s.blocks for s in candidate.stages) for candidate in planned} == {blocks}


def test_blocks_of_a_family_that_the_planner_does_not_know_are_counted(tmp_path):
    config = _config(tmp_path, parallel={"pipeline_model_parallel_size": 2})
    architecture = resolve_architecture(config)
    family = dataclasses.replace(architecture.family, shape=None)
    unknown = dataclasses.replace(architecture, family=family)
    dealt = with_stages(config, unknown).config
    assert [len(dealt.stage(n).blocks) for n in range(2)] == [2, 2]
    with pytest.raises(ValueError, match=r"model.family = flux: the planner does not know"):
        workload_of(config, unknown)
    assert "not known" in memory_check(config, unknown, 2, host(2)).found


@pytest.mark.parametrize(
    ("in_flight", "waves", "few", "instead"),
    [
        (0, 8, None, None),
        (2, 8, "2 trajectories are in flight on 4", 4),
        (0, 2, "2 trajectories are in flight on 4", None),
        (0, 6, "the last 2 of 6 trajectories are in flight on 4", 6),
        (0, 9, "the last of 9 trajectories is in flight on 4", 5),
    ],
)
def test_few_waves_are_said_with_what_they_cost(tmp_path, in_flight, waves, few, instead):
    parallel = {"pipeline_model_parallel_size": 4, "pipeline_waves_in_flight": in_flight}
    grpo = {"prompts_per_iteration": 1, "group_size": waves, "micro_batch_size": 1}
    said = few_waves(_config(tmp_path, parallel=parallel, grpo=grpo), 1)
    if few is None:
        assert said is None
        return
    better = f"pipeline_waves_in_flight = {instead}" if instead else "smaller grpo.micro_batch_size"
    assert few in said and f"{better} " in said
