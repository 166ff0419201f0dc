# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""One forward of each of two checkpoints on the CPU, with the same inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from checkpoints_tools.opening import Checkpoint
from megatron_leangrpo import platform

_SEED = 0
_ROWS, _COLUMNS = 4, 6
_TEXT_TOKENS = {"flux": 9, "wan": 512}
_IMAGE_TOKENS = 257
# Two implementations round differently: a few hundred sums in float32, all of them in bfloat16.
_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4}
_NARROW_TOLERANCE = 5e-2


@dataclass(frozen=True)
class ForwardDifference:
    """How far two outputs are apart."""

    largest: float
    relative: float
    tolerance: float

    @property
    def equal(self) -> bool:
        """Whether the difference is rounding; a NaN is none."""
        return self.relative <= self.tolerance


def compare_forward(first: Checkpoint, second: Checkpoint) -> ForwardDifference:
    """Run both, one after the other, each in the dtype of its weights."""
    outputs = []
    for checkpoint in (first, second):
        inputs = _inputs(checkpoint)
        run = _run_diffusers if checkpoint.format == "diffusers" else _run_ours
        with torch.no_grad():
            outputs.append(run(checkpoint, inputs).double())
    a, b = outputs
    size = b.norm().item()
    relative = (a - b).norm().item() / size if size else math.inf
    dtypes = (first.settings.params_dtype, second.settings.params_dtype)
    tolerance = max(_TOLERANCES.get(dtype, _NARROW_TOLERANCE) for dtype in dtypes)
    return ForwardDifference((a - b).abs().max().item(), relative, tolerance)


def _inputs(checkpoint: Checkpoint) -> SimpleNamespace:
    """Random inputs of the model's sizes; `grid` is in tokens."""
    settings = checkpoint.settings
    generator = torch.Generator().manual_seed(_SEED)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(settings.params_dtype)

    tokens = _ROWS * _COLUMNS
    is_flux = checkpoint.family_name == "flux"
    channels = settings.in_channels if is_flux else 4 * settings.out_channels
    inputs = SimpleNamespace(
        latents=normal(1, tokens, channels),
        timestep=torch.full((1,), 0.5),
        prompt_embeds=normal(1, _TEXT_TOKENS[checkpoint.family_name], settings.joint_attention_dim),
        pooled=None,
        guidance=None,
        image_embeds=None,
        image_latents=None,
        grid=(_ROWS, _COLUMNS) if is_flux else (1, _ROWS, _COLUMNS),
    )
    if is_flux:
        inputs.timestep = inputs.timestep.to(settings.params_dtype)
        inputs.pooled = normal(1, settings.pooled_projection_dim)
        if settings.guidance_embeds:
            inputs.guidance = torch.full((1,), 3.5, dtype=settings.params_dtype)
    else:
        beside = 4 * (settings.in_channels - settings.out_channels)
        if beside:
            inputs.image_latents = normal(1, tokens, beside)
        if settings.image_dim:
            inputs.image_embeds = normal(1, _IMAGE_TOKENS, settings.image_dim)
    return inputs


def _run_ours(checkpoint: Checkpoint, inputs: SimpleNamespace) -> torch.Tensor:
    platform.initialize_distributed(tensor_model_parallel_size=1)
    try:
        model = checkpoint.family.build(checkpoint.settings)
        ours = checkpoint.ours
        for name, parameter in model.named_parameters():
            parameter.copy_(ours[name])
        return model(inputs.latents, inputs.timestep, inputs, grid=inputs.grid)
    finally:
        platform.destroy_distributed()


def _run_diffusers(checkpoint: Checkpoint, inputs: SimpleNamespace) -> torch.Tensor:
    import diffusers
    from accelerate import init_empty_weights

    model_class = getattr(diffusers, checkpoint.family.class_name)
    # Its tables of positions are buffers that no file holds.
    with init_empty_weights(include_buffers=False):
        model = model_class.from_config(checkpoint.config)
    model.load_state_dict(dict(checkpoint.tensors), strict=True, assign=True)
    return _flux(model, inputs) if checkpoint.family_name == "flux" else _wan(model, inputs)


def _flux(model: Any, inputs: SimpleNamespace) -> torch.Tensor:
    rows, columns = inputs.grid
    ids = torch.zeros(rows, columns, 3)
    ids[..., 1] += torch.arange(rows)[:, None]
    ids[..., 2] += torch.arange(columns)[None, :]
    return model(
        hidden_states=inputs.latents,
        encoder_hidden_states=inputs.prompt_embeds,
        pooled_projections=inputs.pooled,
        timestep=inputs.timestep,
        img_ids=ids.view(-1, 3),
        txt_ids=torch.zeros(inputs.prompt_embeds.shape[1], 3),
        guidance=inputs.guidance,
        return_dict=False,
    )[0]


def _wan(model: Any, inputs: SimpleNamespace) -> torch.Tensor:
    """Diffusers takes unpacked videos and timesteps up to 1000."""
    frames, rows, columns = inputs.grid

    def unpacked(tokens: torch.Tensor) -> torch.Tensor:
        video = tokens.unflatten(1, inputs.grid).unflatten(-1, (-1, 2, 2))
        return video.permute(0, 4, 1, 2, 5, 3, 6).reshape(1, -1, frames, 2 * rows, 2 * columns)

    video = unpacked(inputs.latents)
    if inputs.image_latents is not None:
        video = torch.cat((video, unpacked(inputs.image_latents)), dim=1)
    velocity = model(
        hidden_states=video,
        timestep=1000 * inputs.timestep,
        encoder_hidden_states=inputs.prompt_embeds,
        encoder_hidden_states_image=inputs.image_embeds,
        return_dict=False,
    )[0]
    tokens = velocity.reshape(1, -1, frames, rows, 2, columns, 2).permute(0, 2, 3, 5, 1, 4, 6)
    return tokens.flatten(4).flatten(1, 3)
