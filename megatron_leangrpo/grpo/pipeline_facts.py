# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What a run says of its pipeline at the start."""

from megatron_leangrpo.config import RunConfig
from megatron_leangrpo.grpo.architecture import Architecture
from megatron_leangrpo.grpo.in_flight import batch_of
from megatron_leangrpo.pipeline.bubbles import few_trajectories


def describe_stages(architecture: Architecture) -> str:
    """Stages and blocks of each; nothing where there is one stage."""
    settings = architecture.config
    stages = settings.pipeline_model_parallel_size
    if stages == 1:
        return ""
    blocks = " + ".join(str(len(settings.stage(n).blocks)) for n in range(stages))
    return f"pipeline parallel {stages} (blocks {blocks}), "


def few_waves(config: RunConfig, dp_size: int) -> str | None:
    """What it costs that fewer waves are in flight than there are stages, if only at the end of an
    iteration; None where enough are.
    """
    parallel, grpo = config.parallel, config.grpo
    stages = parallel.pipeline_model_parallel_size
    waves = batch_of(grpo, dp_size).waves
    in_flight = min(parallel.pipeline_waves_in_flight or stages, waves)
    schedule = grpo.jagg_on if grpo.schedule == "jagg" else grpo.schedule
    cost = few_trajectories(schedule, stages, waves, in_flight, config.sampling.num_steps)
    if cost is None:
        return None
    if in_flight < waves:
        sizes = range(min(stages, waves), waves + 1)
        fuller = next(size for size in sizes if waves % size == 0 or waves % size >= stages)
        advice = f"parallel.pipeline_waves_in_flight = {fuller}"
    else:
        advice = "smaller grpo.micro_batch_size or fewer stages"
    return f"{cost}: {advice} would wait less"
