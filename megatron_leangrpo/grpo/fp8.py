# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The `fp8` section of a run: what can be, what the models are told, and the first scales."""

from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch

from megatron_leangrpo import platform
from megatron_leangrpo.conditioning.encoders import Conditioning
from megatron_leangrpo.conditioning.prompts import Prompt
from megatron_leangrpo.config import RunConfig
from megatron_leangrpo.grpo.policy import Policy
from megatron_leangrpo.grpo.rollout import RolloutSettings
from megatron_leangrpo.parallel.noise import initial_noise_batch
from megatron_leangrpo.precision.recipe import Fp8Settings
from megatron_leangrpo.precision.scaling import recording_scales, renew_scales

_EXACT_WITH_QUANTIZED = ("replay", "retain")


def fp8_settings(config: RunConfig, needs_backend: bool = True) -> Fp8Settings | None:
    """The recipe of a run, or None; ``ValueError`` for what cannot be.

    `needs_backend` says that this machine is to run it.
    """
    fp8 = config.fp8
    _check_numbers(config)
    if fp8.recipe == "none":
        return None
    settings = Fp8Settings(**asdict(fp8))
    if config.model.dtype == "float64":
        raise ValueError(
            f"model.dtype = float64: fp8.recipe = {fp8.recipe} quantises bfloat16 or float32"
        )
    _check_backward(config)
    if fp8.backend == "transformer_engine" and needs_backend:
        from megatron_leangrpo.precision.transformer_engine import check_available

        check_available(settings, config.parallel.tensor_model_parallel_size)
    return settings


def check_fp8_training(config: RunConfig) -> None:
    """Raise ``ValueError`` for a schedule that needs a backward that is linear."""
    quantized = config.fp8.recipe != "none" and config.fp8.backward == "quantized"
    if quantized and config.grpo.schedule not in _EXACT_WITH_QUANTIZED:
        raise ValueError(
            f"grpo.schedule = {config.grpo.schedule}: with fp8.backward = quantized a gradient is "
            "not linear in the advantage, because it is rounded on its way; valid: grpo.schedule = "
            f"{' or '.join(_EXACT_WITH_QUANTIZED)}, or fp8.backward = dequantized"
        )


def _check_numbers(config: RunConfig) -> None:
    for name, least in (("amax_history_len", 1), ("margin", 0), ("first_last_blocks_bf16", 0)):
        value = getattr(config.fp8, name)
        if value < least:
            raise ValueError(f"fp8.{name} = {value} must be {least} or more")


def _check_backward(config: RunConfig) -> None:
    fp8, tp = config.fp8, config.parallel.tensor_model_parallel_size
    if fp8.backward == "dequantized":
        return
    if fp8.recipe == "delayed":
        raise ValueError(
            "fp8.backward = quantized: delayed scaling has no scale for gradients before the first "
            "backward; valid: dequantized, or fp8.recipe = current, blockwise or mxfp8"
        )
    if tp > 1:
        raise ValueError(
            f"fp8.backward = quantized at parallel.tensor_model_parallel_size = {tp}: only 1 is "
            "there; valid: dequantized"
        )


def calibrate_scales(
    policy: Policy,
    settings: RolloutSettings,
    encode: Callable[[Sequence[str]], Conditioning],
    prompt: Prompt,
) -> None:
    """Give delayed scaling its first scales: a look at one sample's first and last noise level.

    A collective; every rank looks at the same, one without blocks in FP8 has its stage to run. At
    scale 1, which transformer-engine begins with, small weights would be rounded to E4M3's
    subnormals.
    """
    shape, dtype = settings.latent_shape, policy.latent_dtype
    x = initial_noise_batch(settings.seed, 0, [(prompt.id, 0)], shape, dtype)
    x, conditioning = x.to(platform.device()), encode([prompt.text])
    timesteps = settings.schedule.timesteps
    with recording_scales(policy.model), torch.no_grad():
        for timestep in (timesteps[0], timesteps[-1]):
            policy(x, timestep.to(x).expand(1), conditioning)
    renew_scales(policy.model)
