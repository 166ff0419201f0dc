# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What the FLUX tests share: diffusers' own model as the reference, inputs, and the measure."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_leangrpo.models.flux.config import FluxConfig, flux_tiny, to_diffusers_config

# float32 through four blocks in two orders of summation; a wrong factor anywhere is 1e-1 or more.
TOLERANCE = 1e-5


@dataclass
class Prompt:
    """The fields of a conditioning that the model reads."""

    prompt_embeds: torch.Tensor
    pooled: torch.Tensor
    guidance: torch.Tensor | None


@dataclass
class Inputs:
    """One batch and the gradient that flows back into the velocity."""

    latents: torch.Tensor
    timestep: torch.Tensor
    prompt: Prompt
    grid: tuple[int, int]
    velocity_grad: torch.Tensor


def small_config(**overrides) -> FluxConfig:
    """Two blocks of each kind, guidance on."""
    return flux_tiny(**{"num_double_blocks": 2, "num_single_blocks": 2, **overrides})


def make_inputs(
    config: FluxConfig, grid=(3, 5), text_tokens=7, batch=2, seed=0, dtype=torch.float32
) -> Inputs:
    """Random inputs, different for every sample; 15 image and 7 text tokens divide by nothing."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    latents = normal(batch, grid[0] * grid[1], config.in_channels)
    timestep = torch.rand(batch, generator=generator, dtype=torch.float64).to(dtype)
    guidance = torch.linspace(1.5, 4.5, batch, dtype=dtype) if config.guidance_embeds else None
    prompt = Prompt(
        normal(batch, text_tokens, config.joint_attention_dim),
        normal(batch, config.pooled_projection_dim),
        guidance,
    )
    return Inputs(latents, timestep, prompt, grid, normal(*latents.shape))


def diffusers_model(config: FluxConfig, seed: int = 0) -> torch.nn.Module:
    """diffusers' model of the same architecture with random weights, norms included."""
    from diffusers import FluxTransformer2DModel

    arguments = {k: v for k, v in to_diffusers_config(config).items() if not k.startswith("_")}
    torch.manual_seed(seed)
    model = FluxTransformer2DModel(**arguments)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm_" in name and name.endswith(("q.weight", "k.weight")):
                parameter.uniform_(0.5, 1.5)
    return model


def diffusers_velocity(model: torch.nn.Module, inputs: Inputs) -> torch.Tensor:
    """diffusers' output for the same inputs."""
    rows, columns = inputs.grid
    ids = torch.zeros(rows, columns, 3)
    ids[..., 1] += torch.arange(rows)[:, None]
    ids[..., 2] += torch.arange(columns)[None, :]
    text = inputs.prompt.prompt_embeds.shape[1]
    return model(
        hidden_states=inputs.latents,
        encoder_hidden_states=inputs.prompt.prompt_embeds,
        pooled_projections=inputs.prompt.pooled,
        timestep=inputs.timestep,
        img_ids=ids.view(-1, 3),
        txt_ids=torch.zeros(text, 3),
        guidance=inputs.prompt.guidance,
        return_dict=False,
    )[0]


def relative_l2(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of the expected tensor."""
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).norm() / expected.norm()).item()


def worst(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest relative L2 over tensors of the same names, and where it is."""
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    return max((relative_l2(actual[name], expected[name]), name) for name in expected)


def reference(config: FluxConfig, inputs: Inputs) -> dict[str, torch.Tensor | dict]:
    """diffusers' weights, velocity and gradients for `inputs`."""
    model = diffusers_model(config)
    velocity = diffusers_velocity(model, inputs)
    velocity.backward(inputs.velocity_grad)
    return {
        "weights": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "velocity": velocity.detach(),
        "gradients": {name: p.grad for name, p in model.named_parameters()},
    }


def wrap_data_parallel(
    model: torch.nn.Module, use_distributed_optimizer: bool = False
) -> torch.nn.Module:
    """megatron's wrapper, which collects gradients in `main_grad`."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    settings = DistributedDataParallelConfig(use_distributed_optimizer=use_distributed_optimizer)
    return DistributedDataParallel(model.config, settings, model)


def finalize_gradients(wrapped: torch.nn.Module) -> None:
    """Sum gradients over data-parallel ranks, and over tensor-parallel ranks where tagged."""
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads([wrapped])
