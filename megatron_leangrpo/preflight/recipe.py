# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Whether the recipe can run on the ranks there are, by its own checks and by the planner."""

import torch

from megatron_leangrpo import platform
from megatron_leangrpo.config import RunConfig
from megatron_leangrpo.grpo.architecture import Architecture
from megatron_leangrpo.grpo.config_checks import check_training
from megatron_leangrpo.grpo.dry_run import check_run, rank_bytes
from megatron_leangrpo.grpo.experiment import check_schedule
from megatron_leangrpo.grpo.fp8 import check_fp8_training, fp8_settings
from megatron_leangrpo.grpo.plan import possible_layouts, stages_to_try
from megatron_leangrpo.grpo.planning import all_candidates, configured_ranks, workload_of
from megatron_leangrpo.planner import gpus
from megatron_leangrpo.planner.selector import Candidate, choose, name_of
from megatron_leangrpo.planner.workload import Workload
from megatron_leangrpo.preflight.result import Check


def check_recipe(config: RunConfig, world: int, local_ranks: int) -> list[Check]:
    """What can be seen to be wrong without loading a weight, and whether the memory will do."""
    try:
        check_training(config)
        if config.grpo.schedule != "auto":
            check_schedule(config.grpo.schedule, config.grpo)
        # Also whether this node's GPU and packages can do it.
        fp8_settings(config)
        check_fp8_training(config)
        checked = check_run(config, world)
    except (ValueError, FileNotFoundError) as error:
        return [Check("recipe", False, str(error))]
    good = Check("recipe", True, f"{config.recipe} on {world} ranks")
    return [good, memory_check(config, checked.architecture, world, own_device(local_ranks))]


def own_device(local_ranks: int) -> gpus.Gpu:
    """The device of this rank, for the planner."""
    if platform.is_host():
        return gpus.host(local_ranks)
    properties = torch.cuda.get_device_properties(platform.device())
    return gpus.like_device(properties.name, properties.total_memory)


def memory_check(
    config: RunConfig, architecture: Architecture, world: int, device: gpus.Gpu
) -> Check:
    """Whether the configured schedule fits by the planner's model; else what would."""
    if architecture.family.shape is None:
        return Check("memory", True, f"not known for model.family = {config.model.family}")
    work = workload_of(config, architecture)
    ranks = configured_ranks(config, world)
    found = all_candidates(config, work, [ranks], device)
    have = f"{device.budget / gpus.GIB:.1f} GiB usable on {device.name}"
    own = _configured(config, found)
    if own is not None and own.fits(device.budget):
        return Check("memory", True, f"{own.memory.total / gpus.GIB:.1f} GiB of {have}")
    try:
        choice = choose(work, found, device.budget, device.name)
    except ValueError as error:
        return Check("memory", False, f"{error}{_other_layout(config, work, world, device)}")
    chosen = choice.chosen
    needs = f"{chosen.memory.total / gpus.GIB:.1f} GiB"
    if own is None:
        return Check("memory", True, f"{name_of(chosen)} takes {needs} of {have}")
    return Check(
        "memory",
        False,
        f"{name_of(own)} takes {own.memory.total / gpus.GIB:.1f} GiB, and there are {have}; "
        f"grpo.schedule={chosen.schedule} with model.recompute_granularity={chosen.recompute} "
        f"would take {needs} (leangrpo plan shows all)",
    )


def _other_layout(config: RunConfig, work: Workload, world: int, device: gpus.Gpu) -> str:
    """What would fit on these ranks if they were divided otherwise."""
    layouts = possible_layouts(config, work, device, world, stages_to_try(config))
    try:
        chosen = choose(
            work, all_candidates(config, work, layouts, device), device.budget, device.name
        ).chosen
    except ValueError:
        return f"; no other layout of these {world} ranks fits either"
    ranks = chosen.ranks
    return (
        f"; parallel.tensor_model_parallel_size={ranks.tensor} with "
        f"parallel.context_parallel_size={ranks.context}, "
        f"parallel.pipeline_model_parallel_size={ranks.pipeline}, "
        f"grpo.schedule={chosen.schedule} and "
        f"model.recompute_granularity={chosen.recompute} would take "
        f"{chosen.memory.total / gpus.GIB:.1f} GiB here (leangrpo plan shows all)"
    )


def _configured(config: RunConfig, found: list[Candidate]) -> Candidate | None:
    """What the recipe says, or None where it leaves the choice to the planner."""
    if config.grpo.schedule == "auto":
        return None
    wanted = (config.grpo.schedule, config.model.recompute_granularity)
    return next(c for c in found if (c.schedule, c.recompute) == wanted)


def checkpoint_bytes(config: RunConfig, architecture: Architecture) -> int:
    """About what a checkpoint takes on disk: trained weights, optimizer and average, once."""
    sizes, parallel = rank_bytes(config, architecture, 1), config.parallel
    weights = sizes.weights
    if architecture.adaptation is not None:
        # The frozen base is not in it; gradients are as large as the adapters.
        weights = sizes.gradients
    elif config.model.expert_offload:
        weights *= architecture.config.experts
    total = weights + sizes.optimizer + sizes.average
    return total * parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
