# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Builds the parts of a run from its configuration; train, compare and sample share them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from megatron_leangrpo import platform
from megatron_leangrpo.codecs.base import LatentCodec
from megatron_leangrpo.conditioning.cache import CachedEncoder
from megatron_leangrpo.conditioning.encoders import Conditioning, TextEncoder
from megatron_leangrpo.conditioning.prompts import Prompt, PromptSampler
from megatron_leangrpo.config import GrpoConfig, RunConfig
from megatron_leangrpo.grpo.architecture import Architecture, resolve_architecture
from megatron_leangrpo.grpo.data_parallel import wrap_data_parallel, wrappers_of
from megatron_leangrpo.grpo.early_reduction import EarlyReduction
from megatron_leangrpo.grpo.evaluation import Evaluator
from megatron_leangrpo.grpo.fp8 import calibrate_scales
from megatron_leangrpo.grpo.gradient_buffers import GradientBuffers
from megatron_leangrpo.grpo.guided import Guidance, GuidedPolicy
from megatron_leangrpo.grpo.inputs import (
    build_codec,
    build_encoder,
    check_parts,
    check_prompts,
    latent_geometry,
    read_prompts,
)
from megatron_leangrpo.grpo.iteration import IterationRunner
from megatron_leangrpo.grpo.objective import Objective
from megatron_leangrpo.grpo.passes import WholeModel
from megatron_leangrpo.grpo.pipelined import PipelinedModel
from megatron_leangrpo.grpo.planning import with_stages
from megatron_leangrpo.grpo.policy import Policy
from megatron_leangrpo.grpo.reference import reference_of
from megatron_leangrpo.grpo.rollout import RolloutSettings, sigma_schedule
from megatron_leangrpo.grpo.routing import JaggRouter
from megatron_leangrpo.grpo.run_reward import build_run_reward
from megatron_leangrpo.grpo.schedules import SCHEDULES
from megatron_leangrpo.grpo.scoring import Scorer
from megatron_leangrpo.grpo.stage_forwards import OneByOne
from megatron_leangrpo.pipeline.transport import StageTransport


@dataclass
class Experiment:
    """The parts of a run on this rank."""

    config: RunConfig
    architecture: Architecture
    policy: Policy
    model: torch.nn.Module
    """The policy's transformer in megatron's data-parallel wrapper."""
    reference: Policy | None
    codec: LatentCodec
    encoder: object
    prompts: list[Prompt]
    sampler: PromptSampler
    evaluation_prompts: list[Prompt]
    scorer: Scorer
    settings: RolloutSettings
    objective: Objective
    transport: StageTransport | None
    """Messages between pipeline stages, where there are any."""
    early: EarlyReduction | None
    """Where gradients are summed beside the last backward of an update."""

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """Encode prompts on the policy's device and dtype, guidance included."""
        return encode(self.encoder, self.architecture, prompts)

    def runner(self, schedule: str) -> IterationRunner:
        """Return an iteration runner that uses the named schedule."""
        grpo = self.config.grpo
        check_schedule(schedule, grpo)
        router = None
        if schedule == "jagg":
            sigmas = self.settings.schedule
            boundary = sigmas.first_below(self.architecture.config.expert_boundary)
            router = JaggRouter(grpo.jagg_window, grpo.jagg_frac, sigmas.num_steps, boundary)
            schedule = grpo.jagg_on
        buffers = GradientBuffers(self.model)
        passes = self._passes(buffers, self.reference)
        return IterationRunner(
            self.model,
            passes,
            SCHEDULES[schedule](passes, self.objective, buffers),
            self.settings,
            grpo,
            self.encode,
            self.scorer,
            router,
            self.early,
        )

    def _passes(
        self, buffers: GradientBuffers, reference: Policy | None
    ) -> WholeModel | PipelinedModel:
        if self.transport is None:
            return WholeModel(self.policy, reference, buffers)
        in_flight = self.config.parallel.pipeline_waves_in_flight or self.transport.stages
        return PipelinedModel(self.policy, reference, buffers, self.transport, in_flight)

    def evaluator(self) -> Evaluator:
        """Return the evaluator of the run."""
        config, shape = self.config, self.settings.latent_shape
        return Evaluator(
            self._passes(GradientBuffers(self.model), reference=None),
            sigma_schedule(config.sampling, config.evaluation.num_steps, shape[0]),
            config.evaluation,
            self.evaluation_prompts,
            self.encode,
            self.scorer,
            shape,
        )


def build_experiment(config: RunConfig) -> Experiment:
    """Build every part, cheap checks first, so that a mistake shows before weights are read.

    Call `platform.initialize_distributed` before. Raises ``ValueError`` for what a user can cause.
    """
    architecture = resolve_architecture(config)
    check_parts(architecture)
    architecture = with_stages(config, architecture)
    prompts, evaluation_prompts = read_prompts(config)
    reward = build_run_reward(config.reward)
    check_prompts(config, reward, prompts, evaluation_prompts)
    latent_shape, grid = latent_geometry(config, architecture)
    sampling = config.sampling
    settings = RolloutSettings.from_config(sampling, latent_shape, config.seed)
    objective = objective_config(config)
    sampler = PromptSampler(prompts, config.grpo.prompts_per_iteration, config.seed)
    codec, encoder = build_codec(architecture), build_encoder(config, architecture)
    if isinstance(encoder, CachedEncoder):
        texts = [prompt.text for prompt in (*prompts, *evaluation_prompts)]
        negative = [sampling.negative_prompt] if sampling.cfg_scale > 1 else []
        encoder.prepare([*texts, *negative], noted=texts)

    model = architecture.build_model(platform.device())
    transport = None
    if platform.pp_size() > 1:
        transport = StageTransport(platform.pp_group(), platform.timeout_seconds())
    one_by_one = None if transport is None else OneByOne(transport)
    policy = Policy(model, grid, architecture.config.params_dtype, one_by_one)
    if config.fp8.recipe == "delayed":
        calibrate_scales(policy, settings, partial(encode, encoder, architecture), prompts[0])
    if sampling.cfg_scale > 1:
        negative = encode(encoder, architecture, [sampling.negative_prompt])
        policy = GuidedPolicy(policy, guidance_of(config, architecture, negative))
    reference = None
    if objective.kl_beta > 0:
        reference = reference_of(policy, config.grpo.reference_offload)
    optimizer = config.optimizer
    early_reduce = optimizer.overlap_grad_reduce
    wrapped = wrap_data_parallel(model, optimizer.use_distributed_optimizer, early_reduce)
    return Experiment(
        config=config,
        architecture=architecture,
        policy=policy,
        model=wrapped,
        reference=reference,
        codec=codec,
        encoder=encoder,
        prompts=prompts,
        sampler=sampler,
        evaluation_prompts=evaluation_prompts,
        scorer=Scorer(codec, reward, sampling.height, sampling.width, sampling.num_frames),
        settings=settings,
        objective=objective,
        transport=transport,
        # Of two experts the one for low noise waits: on some rank the last backward may be its.
        early=EarlyReduction(wrappers_of(wrapped)[0]) if early_reduce else None,
    )


def encode(
    encoder: TextEncoder, architecture: Architecture, prompts: Sequence[str]
) -> Conditioning:
    """Encode prompts on the policy's device and dtype, guidance embedding included."""
    conditioning = encoder.encode(list(prompts))
    conditioning = conditioning.to(platform.device(), architecture.config.params_dtype)
    scale = architecture.guidance_scale
    return conditioning if scale is None else conditioning.with_guidance(scale)


def guidance_of(config: RunConfig, architecture: Architecture, negative: Conditioning) -> Guidance:
    """Return the classifier-free guidance of a run."""
    sampling = config.sampling
    low = sampling.cfg_scale if sampling.cfg_scale_2 is None else sampling.cfg_scale_2
    return Guidance(
        negative=negative,
        scale=sampling.cfg_scale,
        low_noise_scale=low,
        boundary=architecture.config.expert_boundary,
        forwards=sampling.cfg_forwards,
        detach=config.grpo.cfg_detach,
    )


def objective_config(config: RunConfig) -> Objective:
    """Return the objective of a run, checked against its kernel."""
    grpo = config.grpo
    objective = Objective(
        clip_range=grpo.clip_range,
        adv_clip=grpo.adv_clip,
        ratio_norm=grpo.ratio_norm,
        kl_beta=grpo.kl_beta,
        kl_form=grpo.kl_form,
    )
    objective.check_kernel(config.sampling.kernel)
    return objective


def check_schedule(name: str, grpo: GrpoConfig) -> None:
    """Raise ``ValueError`` where a schedule and the batch cannot hold together."""
    reweights = name == "reweight" or (name == "jagg" and grpo.jagg_on == "reweight")
    if reweights and grpo.micro_batch_size != 1:
        on = "" if name == "reweight" else "jagg on "
        setting = "schedule" if name == "reweight" else "jagg_on"
        raise ValueError(
            f"grpo.micro_batch_size = {grpo.micro_batch_size}: the schedule {on}reweight needs 1, "
            "because a sum of gradients with several advantages cannot be weighed afterwards; "
            f"or use grpo.{setting} = retain or replay"
        )
