# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What the Wan tests share: diffusers' own model as the reference, inputs, and weights by name."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from megatron_leangrpo.models.common.weights import (
    full_tensors,
    gradient_of,
    load_full_tensors,
    unwrapped,
)
from megatron_leangrpo.models.wan.config import WanConfig, to_diffusers_config, wan_tiny
from megatron_leangrpo.models.wan.weight_map import weight_rules

# float32 through two blocks in two orders of summation; a wrong factor anywhere is 1e-1 or more.
TOLERANCE = 1e-5
TEXT_TOKENS = 512
"""What diffusers expects where picture tokens come before them."""


@dataclass
class Prompt:
    """The fields of a conditioning that the model reads."""

    prompt_embeds: torch.Tensor
    image_embeds: torch.Tensor | None
    image_latents: torch.Tensor | None


@dataclass
class Inputs:
    """One batch and the gradient that flows back into the velocity."""

    latents: torch.Tensor
    timestep: torch.Tensor
    prompt: Prompt
    grid: tuple[int, int, int]
    velocity_grad: torch.Tensor

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same numbers in another dtype."""
        fields = {k: None if v is None else v.to(dtype) for k, v in vars(self.prompt).items()}
        return replace(
            self,
            latents=self.latents.to(dtype),
            prompt=Prompt(**fields),
            velocity_grad=self.velocity_grad.to(dtype),
        )


def text_to_video(**overrides) -> WanConfig:
    """Two blocks, four heads of 16, of which time rotates 8 and rows and columns 4 each."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 80}
    return wan_tiny(**{**sizes, "in_channels": 3, "out_channels": 3, **overrides})


def image_to_video(**overrides) -> WanConfig:
    """With a picture's latents beside the video's, and its embedding beside the text."""
    return text_to_video(**{"in_channels": 8, "image_dim": 20, **overrides})


def make_inputs(
    config: WanConfig, grid=(3, 3, 5), batch=2, seed=0, image_tokens=7, per_token=False
) -> Inputs:
    """Random inputs, different for every sample; 45 tokens divide by no power of two."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    tokens, channels = grid[0] * grid[1] * grid[2], 4 * config.out_channels
    latents = normal(batch, tokens, channels)
    timestep = torch.rand(batch, *[tokens] * per_token, generator=generator)
    beside = 4 * (config.in_channels - config.out_channels)
    # Were all tokens of one length, the gradients of the keys' biases would cancel almost to zero,
    # and float32 would give them, here and in diffusers, less than five digits.
    lengths = torch.linspace(0.0, 2.0, TEXT_TOKENS)[:, None]
    prompt = Prompt(
        lengths * normal(batch, TEXT_TOKENS, config.joint_attention_dim),
        normal(batch, image_tokens, config.image_dim) if config.image_dim else None,
        normal(batch, tokens, beside) if beside else None,
    )
    return Inputs(latents, timestep, prompt, grid, normal(batch, tokens, channels))


def unpack(tokens: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
    """`[b, s, 4c]` to diffusers' `[b, c, frames, 2 rows, 2 columns]`."""
    video = tokens.unflatten(1, grid).unflatten(-1, (-1, 2, 2))
    return video.permute(0, 4, 1, 2, 5, 3, 6).flatten(5, 6).flatten(3, 4)


def diffusers_model(config: WanConfig, seed: int = 0) -> torch.nn.Module:
    """diffusers' model of the same architecture with random weights, norms included."""
    from diffusers import WanTransformer3DModel

    arguments = {k: v for k, v in to_diffusers_config(config).items() if not k.startswith("_")}
    torch.manual_seed(seed)
    model = WanTransformer3DModel(**arguments)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                middle = 1.0 if name.endswith("weight") else 0.0
                parameter.uniform_(middle - 0.5, middle + 0.5)
    return model


def diffusers_velocity(model: torch.nn.Module, inputs: Inputs) -> torch.Tensor:
    """diffusers' output for the same inputs, `[b, c, frames, 2 rows, 2 columns]`."""
    latents, beside = inputs.latents, inputs.prompt.image_latents
    if beside is not None:
        latents = torch.cat((latents, beside), dim=-1)
    return model(
        hidden_states=unpack(latents, inputs.grid),
        timestep=inputs.timestep * 1000,
        encoder_hidden_states=inputs.prompt.prompt_embeds,
        encoder_hidden_states_image=inputs.prompt.image_embeds,
        return_dict=False,
    )[0]


def reference(config: WanConfig, inputs: Inputs) -> dict[str, torch.Tensor | dict]:
    """diffusers' weights, velocity and gradients for `inputs`."""
    model = diffusers_model(config)
    velocity = diffusers_velocity(model, inputs)
    velocity.backward(unpack(inputs.velocity_grad, inputs.grid))
    return {
        "weights": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "velocity": velocity.detach(),
        "gradients": {name: p.grad for name, p in model.named_parameters()},
    }


def load(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Fill our model with diffusers' weights."""
    model = unwrapped(model)
    load_full_tensors(model, weight_rules(model.wan_config), weights)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Full gradients under diffusers' names, on every rank."""
    model = unwrapped(model)
    return full_tensors(model, weight_rules(model.wan_config), gradient_of)
