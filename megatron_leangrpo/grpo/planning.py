# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""From a run's configuration to the planner's terms, and `grpo.schedule = auto` to a schedule."""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from megatron_leangrpo import platform
from megatron_leangrpo.config import RunConfig
from megatron_leangrpo.grpo.architecture import Architecture, resolve_architecture
from megatron_leangrpo.grpo.in_flight import batch_of
from megatron_leangrpo.grpo.inputs import latent_geometry
from megatron_leangrpo.grpo.rollout import RolloutSettings
from megatron_leangrpo.models.common.lora_targets import LowRank
from megatron_leangrpo.models.common.shape import Companions
from megatron_leangrpo.planner import gpus
from megatron_leangrpo.planner.adapters import Adapters
from megatron_leangrpo.planner.packing import Packing
from megatron_leangrpo.planner.selector import Candidate, Choice, candidates, choose
from megatron_leangrpo.planner.splitting import split_of
from megatron_leangrpo.planner.workload import Batch, Jagg, Ranks, Workload


def workload_of(config: RunConfig, architecture: Architecture) -> Workload:
    """What the planner needs to know of a run; reads no weights.

    Raises ValueError for a family whose shape the planner does not know.
    """
    if architecture.family.shape is None:
        raise ValueError(
            f"model.family = {config.model.family}: the planner does not know its shape, so that "
            "there is nothing to plan or to choose by; valid for grpo.schedule: any but auto"
        )
    grpo, model = config.grpo, architecture.config
    (tokens, channels), _ = latent_geometry(config, architecture)
    settings = RolloutSettings.from_config(config.sampling, (tokens, channels), config.seed)
    sampling, adaptation = config.sampling, architecture.adaptation
    return Workload(
        shape=architecture.family.shape(model, tokens, config.model.max_text_tokens),
        sampled_steps=sampling.num_steps,
        trained_steps=settings.selector.num_trained(0),
        width=model.params_dtype.itemsize,
        samples=grpo.prompts_per_iteration * grpo.group_size,
        # Three colours in float32.
        picture=12 * sampling.num_frames * sampling.height * sampling.width,
        micro_batch=grpo.micro_batch_size,
        updates=grpo.updates_per_rollout,
        guided=sampling.cfg_scale > 1,
        guided_batch=sampling.cfg_forwards == "joint",
        guided_detached=grpo.cfg_detach and sampling.cfg_forwards == "separate",
        expert_offload=config.model.expert_offload,
        kl=grpo.kl_beta > 0,
        reference_offload=grpo.reference_offload,
        average=config.optimizer.ema_decay > 0,
        distributed_optimizer=config.optimizer.use_distributed_optimizer,
        sequence_parallel=config.parallel.sequence_parallel,
        trainable=None if adaptation is None else adaptation.num_parameters,
        steps_chosen_singly=_chosen_singly(config),
        pipeline_split=model.pipeline_split,
        packing=_packing(config),
        adapters=None if adaptation is None else adapters_of(adaptation.projections),
        jagg=Jagg(grpo.jagg_on, grpo.jagg_window, grpo.jagg_frac),
        companions=_companions(config, architecture),
    )


def with_stages(config: RunConfig, architecture: Architecture) -> Architecture:
    """The architecture with its blocks dealt to the stages of a run's pipeline by their time, where
    the recipe says nothing else and the planner knows the family.
    """
    settings = architecture.config
    if settings.pipeline_model_parallel_size == 1 or settings.pipeline_split is not None:
        return architecture
    if architecture.family.shape is None:
        # Without sizes there are no seconds: blocks are counted.
        return architecture
    in_one_piece = dataclasses.replace(settings, pipeline_model_parallel_size=1)
    work = workload_of(config, dataclasses.replace(architecture, config=in_one_piece))
    ranks = Ranks(
        settings.tensor_model_parallel_size,
        settings.context_parallel_size,
        pipeline=settings.pipeline_model_parallel_size,
    )
    dealt = dataclasses.replace(settings, pipeline_split=split_of(work, ranks))
    return dataclasses.replace(architecture, config=dealt)


_BLOCKS = {"single_transformer_blocks": "single", "transformer_blocks": "double", "blocks": "cross"}
_LINEARS = (
    (r"attn1?\.(to_[qkv]|add_[qkv]_proj)", "qkv"),
    (r"attn1?\.(to_out\.0|to_add_out)|proj_out", "out"),
    (r"attn2\.to_q", "q"),
    (r"attn2\.(to_[kv]|add_[kv]_proj)", "kv"),
    (r"attn2\.to_out\.0", "text out"),
    (r"ff\w*\.net\.0\.proj|proj_mlp", "fc1"),
    (r"ff\w*\.net\.2", "fc2"),
)
"""Ends of diffusers' names of projections, and the planner's of the linears that they are in."""


def adapters_of(projections: Mapping[str, LowRank]) -> Adapters:
    """Which linears have adapters, by diffusers' names of their projections."""
    found = set()
    for name in projections:
        block, _, end = name.split(".", maxsplit=2)
        linear = next((linear for ends, linear in _LINEARS if re.fullmatch(ends, end)), None)
        # Modulations, whose inputs are vectors, are left out.
        if linear is not None:
            found.add(f"{_BLOCKS[block]}.{linear}")
    return Adapters(frozenset(found), max(low.rank for low in projections.values()))


def _packing(config: RunConfig) -> Packing | None:
    fp8 = config.fp8
    if fp8.recipe == "none":
        return None
    block, scale = {"blockwise": (128, 4), "mxfp8": (32, 1)}.get(fp8.recipe, (None, 4))
    return Packing(block, scale, fp8.first_last_blocks_bf16)


def batches_of(config: RunConfig) -> Callable[[Ranks], Batch]:
    """Return a function from a layout to a rank's iteration."""
    rewards = max(1, len(config.reward.weights))
    own = functools.lru_cache(functools.partial(batch_of, config.grpo))
    return lambda ranks: own(ranks.data, rewards, waves_in_flight(config, ranks.pipeline))


def waves_in_flight(config: RunConfig, stages: int) -> int:
    """Waves that are rolled out together: the configured ones, or as many as there are stages."""
    return (config.parallel.pipeline_waves_in_flight or stages) if stages > 1 else 1


def resolve_auto(config: RunConfig, world_size: int) -> tuple[RunConfig, str | None]:
    """Put a schedule in the place of `auto`, for this machine's memory; returns why, too.

    On several ranks this is a collective. Other schedules stay, without a reason.
    """
    if config.grpo.schedule != "auto":
        return config, None
    architecture = resolve_architecture(config, needs_weights=False)
    device = _device(min(world_size, platform.local_world_size()))
    found = _choose_on(config, architecture, device, [configured_ranks(config, world_size)])
    chosen = found.chosen
    changed = dataclasses.replace(
        config,
        grpo=dataclasses.replace(config.grpo, schedule=chosen.schedule),
        model=dataclasses.replace(config.model, recompute_granularity=chosen.recompute),
    )
    return changed, found.reasons[chosen]


def _choose_on(
    config: RunConfig,
    architecture: Architecture,
    device: gpus.Gpu,
    layouts: list[Ranks],
) -> Choice:
    work = workload_of(config, architecture)
    found = all_candidates(config, work, layouts, device)
    return choose(work, found, platform.smallest_over_ranks(device.budget), device.name)


def configured_ranks(config: RunConfig, world_size: int) -> Ranks:
    """How the configuration divides a number of processes."""
    parallel = config.parallel
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    pp = parallel.pipeline_model_parallel_size
    return Ranks(tp, cp, world_size // (tp * cp * pp), pp)


def all_candidates(
    config: RunConfig, work: Workload, layouts: list[Ranks], device: gpus.Gpu
) -> list[Candidate]:
    """Every schedule on some layouts."""
    recompute = config.model.recompute_granularity
    return candidates(work, batches_of(config), layouts, device, recompute)


def _device(local_ranks: int) -> gpus.Gpu:
    """The device of this rank as it is."""
    if platform.is_host():
        return gpus.host(local_ranks)
    import torch

    properties = torch.cuda.get_device_properties(platform.device())
    return gpus.like_device(properties.name, properties.total_memory)


def _chosen_singly(config: RunConfig) -> bool:
    """Whether the trajectories of a wave may train steps of their own."""
    sampling = config.sampling
    return (
        sampling.step_selection == "random_fraction"
        and sampling.selection_scope in (None, "sample")
        and sampling.block_size is None
    )


def _companions(config: RunConfig, architecture: Architecture) -> Companions:
    """Bytes of what a pipeline holds besides its transformer.

    Those of its files where it is on this machine, as published where it is only named; a run
    without a base has none. With a cache of embeddings the text encoders are freed before the
    transformer is loaded.
    """
    if architecture.base is not None:
        dtype = 2 if config.model.dtype == "bfloat16" else 4
        encoders = sum(_numbers(f) for f in architecture.base.glob("text_encoder*"))
        found = Companions(encoders * dtype, _numbers(architecture.base / "vae") * dtype)
    else:
        found = Companions() if config.model.base is None else architecture.family.companions
    cached = config.prompts.embedding_cache is not None
    return dataclasses.replace(found, text_encoders=0) if cached else found


def _numbers(folder: Path) -> int:
    """Numbers in the safetensors files of a folder, from their headers."""
    from safetensors import safe_open

    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                size = 1
                for length in tensors.get_slice(name).get_shape():
                    size *= length
                total += size
    return total
