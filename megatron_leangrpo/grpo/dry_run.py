# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Checks a configuration without loading a weight, and says what the run consists of."""

import dataclasses
import os
from dataclasses import dataclass

from megatron_leangrpo.conditioning.prompts import Prompt, PromptSampler
from megatron_leangrpo.config import ModelConfig, RunConfig
from megatron_leangrpo.grpo.adaptation import is_adapted
from megatron_leangrpo.grpo.architecture import Architecture, resolve_architecture
from megatron_leangrpo.grpo.config_checks import check_training
from megatron_leangrpo.grpo.experiment import check_schedule, objective_config
from megatron_leangrpo.grpo.fp8 import check_fp8_training
from megatron_leangrpo.grpo.inputs import check_parts, check_prompts, latent_geometry, read_prompts
from megatron_leangrpo.grpo.pipeline_facts import describe_stages, few_waves
from megatron_leangrpo.grpo.placement import Group, check_placement, place
from megatron_leangrpo.grpo.planning import resolve_auto, with_stages
from megatron_leangrpo.grpo.rollout import RolloutSettings
from megatron_leangrpo.grpo.routing import saved_backwards
from megatron_leangrpo.grpo.run_reward import build_run_reward, describe_rewards
from megatron_leangrpo.platform import check_layout
from megatron_leangrpo.reporting.console import Console
from megatron_leangrpo.reporting.sentences import byte_size


@dataclass(frozen=True)
class RankBytes:
    """Bytes on each rank that stay for the whole run."""

    weights: int
    gradients: int
    optimizer: int
    average: int
    reference: int


@dataclass(frozen=True)
class CheckedRun:
    """What the checks of a run find out about it."""

    architecture: Architecture
    image_tokens: int
    grid: tuple[int, ...]
    settings: RolloutSettings
    prompts: list[Prompt]


def check_run(config: RunConfig, world_size: int, needs_weights: bool = True) -> CheckedRun:
    """Raise ``ValueError`` for whatever can be seen to be wrong without reading a weight."""
    grpo, parallel = config.grpo, config.parallel
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    pp = parallel.pipeline_model_parallel_size
    check_layout(world_size, tp, cp, pp)
    check_placement(
        grpo.prompts_per_iteration,
        grpo.group_size,
        world_size // (tp * cp * pp),
        grpo.placement,
        grpo.updates_per_rollout,
    )
    architecture = resolve_architecture(config, needs_weights=needs_weights)
    check_parts(architecture)
    architecture.check_weights()
    architecture = with_stages(config, architecture)
    shape, grid = latent_geometry(config, architecture)
    settings = RolloutSettings.from_config(config.sampling, shape, config.seed)
    objective_config(config)
    prompts, evaluation_prompts = read_prompts(config)
    reward = build_run_reward(config.reward, needs_weights)
    check_prompts(config, reward, prompts, evaluation_prompts)
    return CheckedRun(architecture, shape[0], grid, settings, prompts)


def check_and_describe(
    config: RunConfig, console: Console, world_size: int | None = None
) -> RunConfig:
    """Raise ``ValueError`` for what cannot be trained; otherwise print the run's facts.

    Returns the configuration with a schedule in the place of `auto`.

    Without `world_size` this is a dry run: weights need not be on this machine, and the ranks are
    those of the environment variable WORLD_SIZE, or else those of one copy of the model.
    """
    dry_run = world_size is None
    tp = config.parallel.tensor_model_parallel_size
    cp = config.parallel.context_parallel_size
    pp = config.parallel.pipeline_model_parallel_size
    world = int(os.environ.get("WORLD_SIZE", tp * cp * pp)) if world_size is None else world_size
    dp = world // (tp * cp * pp)
    check_training(config)
    check_fp8_training(config)
    checked = check_run(config, world, needs_weights=not dry_run)
    architecture = checked.architecture
    reason = None
    if not dry_run or architecture.base is not None or config.model.base is None:
        config, reason = resolve_auto(config, world)
    check_schedule(config.grpo.schedule, config.grpo)
    trained_steps = checked.settings.selector.num_trained(0)
    left_out = 0.0
    if config.grpo.schedule == "jagg":
        left_out = _backwards_left_out(config, checked, dp)
    facts = {
        "model": _describe_model(config, architecture),
        **_describe_adapters(config, architecture),
        "layout": f"{world} rank{'s' if world > 1 else ''}: tensor parallel {tp}, "
        + (f"context parallel {cp}, " if cp > 1 else "")
        + describe_stages(architecture)
        + f"data parallel {dp}",
        **_describe_size(config, checked),
        "steps": f"{config.sampling.num_steps}, of which {trained_steps} are "
        f"trained ({config.sampling.step_selection}), kernel {config.sampling.kernel}",
        "iteration": describe_batch(config, dp),
        "prompts": f"{len(checked.prompts)} in {config.prompts.train}",
        "rewards": describe_rewards(config.reward),
        "schedule": _describe_schedule(config, trained_steps, left_out, reason),
    }
    if dry_run:
        # The optimizer's state is sharded over all ranks that hold the same weights.
        sizes = rank_bytes(config, architecture, dp * cp)
        total = sum(dataclasses.astuple(sizes))
        parts = ", ".join(f"{n} {byte_size(v)}" for n, v in dataclasses.asdict(sizes).items() if v)
        facts["bytes a rank"] = f"{byte_size(total)} before activations ({parts})"
    console.facts(f"{config.recipe}", facts)
    if config.grpo.schedule == "jagg" and not left_out:
        console.warning(_why_nothing_is_left_out(config))
    few = few_waves(config, dp)
    if few is not None:
        console.warning(few)
    scale = config.model.guidance_scale
    if architecture.guidance_scale is None and scale != ModelConfig().guidance_scale:
        console.warning(f"model.guidance_scale = {scale:g} is ignored: this model takes none")
    return config


def _backwards_left_out(config: RunConfig, checked: CheckedRun, dp_size: int) -> float:
    """Share of the backwards that jagg leaves out in the waves of a first iteration."""
    grpo, sampler = (
        config.grpo,
        PromptSampler(checked.prompts, config.grpo.prompts_per_iteration, config.seed),
    )
    groups = [Group(n, prompt) for n, prompt in enumerate(sampler.batch(0))]
    placement = place(
        groups,
        grpo.group_size,
        dp_rank=0,
        dp_size=dp_size,
        placement=grpo.placement,
        micro_batch_size=grpo.micro_batch_size,
        updates=grpo.updates_per_rollout,
        seed=config.seed,
    )
    waves = [checked.settings.plans(w, 0) for w in placement.waves if w.minibatch == 0]
    expert_boundary = checked.architecture.config.expert_boundary
    boundary = checked.settings.schedule.first_below(expert_boundary)
    return saved_backwards(waves, grpo.jagg_window, grpo.jagg_frac, boundary)


def _why_nothing_is_left_out(config: RunConfig) -> str:
    """Say why jagg would be exact and save nothing, and what would change that."""
    sampling, grpo = config.sampling, config.grpo
    what = "grpo.schedule = jagg leaves out no backward here: "
    if grpo.jagg_window < 3 or grpo.jagg_frac == 0:
        return what + "it needs grpo.jagg_window of 3 or more and grpo.jagg_frac above 0"
    if sampling.step_selection == "random_fraction" and sampling.block_size is None:
        return what + (
            "sampling.step_selection = random_fraction draws single steps; set "
            f"sampling.block_size = {grpo.jagg_window} to draw consecutive ones"
        )
    if sampling.step_selection in ("window", "random_fraction") and grpo.micro_batch_size > 1:
        return what + (
            f"micro-batches of {grpo.micro_batch_size} mix trajectories that train different "
            "steps; set sampling.selection_scope = iteration, or a smaller grpo.micro_batch_size"
        )
    return what + (
        "no window of 3 or more steps is among the trained ones, or grpo.jagg_frac = "
        f"{grpo.jagg_frac} rounds to none"
    )


def rank_bytes(config: RunConfig, architecture: Architecture, dp_size: int) -> RankBytes:
    """Bytes of weights, gradients and their followers on one rank, before activations."""
    tp = config.parallel.tensor_model_parallel_size
    count, trained = architecture.rank_parameters(tp)
    adapted = is_adapted(config.lora)
    width = architecture.config.params_dtype.itemsize
    wide = max(width, 4)
    weights = count * width
    if config.model.expert_offload:
        weights //= architecture.config.experts
    state = 2 * wide
    if adapted:
        # Adapters are float32 or wider; the base below them is the reference of a KL term.
        weights += trained * wide
    elif width < 4:
        # A float32 copy of the weights.
        state += 4
    share = dp_size if config.optimizer.use_distributed_optimizer else 1
    return RankBytes(
        weights=weights,
        gradients=trained * wide,
        optimizer=trained * state // share,
        average=trained * wide if config.optimizer.ema_decay > 0 else 0,
        reference=count * width if config.grpo.kl_beta > 0 and not adapted else 0,
    )


def describe_batch(config: RunConfig, dp_size: int) -> str:
    """Return the batch arithmetic of an iteration."""
    grpo = config.grpo
    samples = grpo.prompts_per_iteration * grpo.group_size
    per_rank = samples // dp_size
    updates = grpo.updates_per_rollout
    return (
        f"{grpo.prompts_per_iteration} prompts x {grpo.group_size} samples = {samples} "
        f"trajectories, {per_rank} a rank in micro-batches of "
        f"{min(grpo.micro_batch_size, per_rank // updates)}, {updates} "
        f"update{'s' if updates > 1 else ''} of {samples // updates}"
    )


def _describe_size(config: RunConfig, checked: CheckedRun) -> dict[str, str]:
    """Pixels and tokens of a sample, and guidance where there is some."""
    sampling, grid = config.sampling, " x ".join(map(str, checked.grid))
    is_video = len(checked.grid) == 3
    kind, what = ("video", "video") if is_video else ("picture", "image")
    frames = f"{sampling.num_frames} frames of " if is_video else ""
    found = {
        kind: f"{frames}{sampling.height} x {sampling.width} pixels (h x w), "
        f"{checked.image_tokens} {what} tokens ({grid}) + "
        f"{config.model.max_text_tokens} text tokens"
    }
    if sampling.cfg_scale > 1:
        low = "" if sampling.cfg_scale_2 is None else f" ({sampling.cfg_scale_2} at low noise)"
        found["guidance"] = (
            f"scale {sampling.cfg_scale}{low}, {sampling.cfg_forwards} forwards, against "
            f"{sampling.negative_prompt!r}"
        )
    return found


def _describe_model(config: RunConfig, architecture: Architecture) -> str:
    if architecture.base:
        source = str(architecture.base)
    elif config.model.base:
        preset = config.model.preset
        source = f"{config.model.base} (not on this machine, sizes of preset {preset})"
    else:
        source = f"preset {config.model.preset}, random weights"
    if architecture.weights:
        source = f"{source.removesuffix(', random weights')}, weights of {architecture.weights}"
    return (
        f"{source}: {architecture.count_parameters():,} parameters, "
        f"{architecture.family.describe(architecture.config)}, {config.model.dtype}"
    )


def _describe_adapters(config: RunConfig, architecture: Architecture) -> dict[str, str]:
    """How much is trained where that is not the whole model."""
    adaptation = architecture.adaptation
    if adaptation is None:
        return {}
    ranks = sorted({low.rank for low in adaptation.projections.values()})
    text = (
        f"rank {', '.join(map(str, ranks))} on {len(adaptation.projections)} projections: "
        f"{adaptation.num_parameters:,} parameters are trained"
    )
    return {"adapters": text if config.lora.path is None else f"{text}, from {config.lora.path}"}


def _describe_schedule(config: RunConfig, trained: int, left_out: float, reason: str | None) -> str:
    """Say what the schedule can save here, counted in forwards.

    A backward is two, or one where the base is frozen and only its input's gradient is computed.
    `left_out` is the share of the backwards that jagg saves, `reason` why `auto` chose a schedule.
    """
    if config.grpo.schedule == "auto":
        return "auto: chosen on the machine that has the base; leangrpo plan says what it would be"
    steps, updates = config.sampling.num_steps, config.grpo.updates_per_rollout
    recomputed = 1 if config.model.recompute_granularity == "full" else 0
    backward = (1 if is_adapted(config.lora) else 2) + recomputed
    replay = steps + (1 + backward) * trained
    text = schedule = config.grpo.schedule
    if schedule == "jagg":
        schedule = config.grpo.jagg_on
        text = f"jagg on {schedule}, {left_out:.0%} of the backwards left out"
    backwards = trained / updates * (1 - left_out)
    saved = trained / updates * left_out * backward
    if schedule == "replay":
        # A backward that is left out needs no forward again either.
        saved += trained / updates * left_out
    else:
        saved += trained / updates
    if schedule == "reweight" and config.grpo.kl_beta > 0:
        # The KL term needs a backward of its own.
        saved -= (backward - recomputed) * backwards
    if saved:
        text += f", at most {replay / (replay - saved):.2f} times replay's speed"
    if reason is not None:
        recompute = config.model.recompute_granularity
        text += f"; chosen by auto with recomputation {recompute}: {reason}"
    if updates > 1:
        text += f"; only the first of {updates} updates is on-policy, the others are replayed"
    return text
