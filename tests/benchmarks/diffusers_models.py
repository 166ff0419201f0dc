# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""diffusers' own transformers with an experiment's weights, called as their pipelines do."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_leangrpo.codecs.packing import pack_video_latents, unpack_video_latents
from megatron_leangrpo.conditioning.encoders import Conditioning
from megatron_leangrpo.grpo.experiment import Experiment
from megatron_leangrpo.models.common.weights import full_tensors, unwrapped
from megatron_leangrpo.models.wan.config import to_diffusers_config
from tests.grpo.oracle import diffusers_flux


class FluxModel:
    """Velocity of packed latents `[b, s, c]` by diffusers' FLUX."""

    def __init__(self, experiment: Experiment) -> None:
        self.transformer = diffusers_flux(experiment.architecture.config, _weights(experiment))
        rows, columns = experiment.policy.grid
        self.image_ids = torch.zeros(rows, columns, 3)
        self.image_ids[..., 1] = torch.arange(rows)[:, None]
        self.image_ids[..., 2] = torch.arange(columns)
        self.image_ids = self.image_ids.reshape(-1, 3)

    def __call__(self, x: Tensor, timestep: Tensor, given: Conditioning) -> Tensor:
        return self.transformer(
            hidden_states=x,
            encoder_hidden_states=given.prompt_embeds,
            pooled_projections=given.pooled,
            timestep=timestep,
            img_ids=self.image_ids,
            txt_ids=torch.zeros(given.prompt_embeds.shape[1], 3),
            guidance=given.guidance,
            return_dict=False,
        )[0]


class WanModel:
    """The same by diffusers' Wan, which unfolds its tokens itself."""

    def __init__(self, experiment: Experiment) -> None:
        from diffusers import WanTransformer3DModel

        arguments = to_diffusers_config(experiment.architecture.config)
        del arguments["_class_name"]
        self.transformer = WanTransformer3DModel(**arguments)
        self.transformer.load_state_dict(_weights(experiment))
        self.rows, self.columns = experiment.policy.grid[1:]

    def __call__(self, x: Tensor, timestep: Tensor, given: Conditioning) -> Tensor:
        velocity = self.transformer(
            hidden_states=unpack_video_latents(x, self.rows, self.columns),
            timestep=timestep * 1000,
            encoder_hidden_states=given.prompt_embeds,
            return_dict=False,
        )[0]
        return pack_video_latents(velocity)


MODELS = {"flux": FluxModel, "wan": WanModel}


def _weights(experiment: Experiment) -> dict[str, Tensor]:
    return full_tensors(unwrapped(experiment.model), experiment.architecture.weight_rules)
