# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What the LoRA tests share: PEFT on diffusers' models, and ours with its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron_leangrpo.models.common.lora import (
    adaptable,
    adapter_rules,
    attach_adapters,
)
from megatron_leangrpo.models.common.lora_targets import LowRank
from megatron_leangrpo.models.common.weights import full_tensors, gradient_of, load_full_tensors
from megatron_leangrpo.models.families import ModelFamily, model_family
from tests.models import flux_parity, wan_parity

RANK, ALPHA = 3, 5.0
# The middle projection of a fused layer without an adapter, in all blocks of one kind.
LEFT_OUT = {"flux": ("single_transformer_blocks", "attn.to_k"), "wan": ("blocks", "attn1.to_k")}


@dataclass
class Reference:
    """PEFT's model: numbers under diffusers' names, and what it gives for `inputs`."""

    inputs: Any
    weights: dict[str, torch.Tensor]
    adapters: dict[str, torch.Tensor]
    velocity: torch.Tensor
    gradients: dict[str, torch.Tensor]


def settings(name: str, **overrides: Any) -> Any:
    """The configuration of the tests' FLUX, or of their Wan from a picture."""
    small = flux_parity.small_config if name == "flux" else wan_parity.image_to_video
    return small(**overrides)


def build(name: str, **overrides: Any) -> tuple[ModelFamily, Any, torch.nn.Module]:
    """The family, the configuration and this rank's share of the model."""
    family, config = model_family(name), settings(name, **overrides)
    return family, config, family.build(config)


def adapted_projections(name: str, model: torch.nn.Module, rules: Any) -> dict[str, LowRank]:
    """All projections of the model but those left out."""
    start, end = LEFT_OUT[name]
    known = adaptable(model, rules)
    chosen = [n for n in known if not (n.startswith(start) and n.endswith(end))]
    assert 0 < len(chosen) < len(known)
    return {n: LowRank(RANK, ALPHA) for n in chosen}


def with_adapters(name: str, reference: Reference, **overrides: Any) -> torch.nn.Module:
    """Our model with the reference's weights and adapters."""
    family, config, model = build(name, **overrides)
    rules = family.weight_rules(config)
    load_full_tensors(model, rules, reference.weights)
    attach_adapters(model, rules, adapted_projections(name, model, rules))
    load_full_tensors(model, adapter_rules(model), reference.adapters)
    return model


def adapter_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Full gradients under PEFT's names, on every rank."""
    return full_tensors(model, adapter_rules(model), gradient_of)


def peft_reference(name: str) -> Reference:
    """Random weights and adapters in PEFT's model, its velocity and its gradients."""
    from peft import LoraConfig

    module = flux_parity if name == "flux" else wan_parity
    config = settings(name)
    inputs = module.make_inputs(config)
    model = module.diffusers_model(config)
    weights = {n: t.clone() for n, t in model.state_dict().items()}
    family, _, ours = build(name)
    names = list(adapted_projections(name, ours, family.weight_rules(config)))
    model.add_adapter(
        LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=names, init_lora_weights="gaussian")
    )
    generator = torch.Generator().manual_seed(3)
    trained = {n: p for n, p in model.named_parameters() if "lora_" in n}
    with torch.no_grad():
        for parameter in trained.values():
            # B A x is then about as large as W x.
            parameter.normal_(std=parameter.shape[1] ** -0.5, generator=generator)
    velocity = module.diffusers_velocity(model, inputs)
    grad = inputs.velocity_grad
    velocity.backward(grad if name == "flux" else wan_parity.unpack(grad, inputs.grid))
    plain = {n: n.replace(".default.weight", ".weight") for n in trained}
    return Reference(
        inputs,
        weights,
        {plain[n]: p.detach().clone() for n, p in trained.items()},
        velocity.detach(),
        {plain[n]: p.grad for n, p in trained.items()},
    )


def velocity_of(name: str, model: torch.nn.Module, inputs: Any) -> torch.Tensor:
    """Our velocity of packed latents."""
    return model(inputs.latents, inputs.timestep, inputs.prompt, inputs.grid)


def as_diffusers(name: str, velocity: torch.Tensor, inputs: Any) -> torch.Tensor:
    """Our velocity in diffusers' shape."""
    return velocity if name == "flux" else wan_parity.unpack(velocity, inputs.grid)
