# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Which transformer a run trains: the architecture of its base or preset, and its weights."""

from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_leangrpo.config import RunConfig
from megatron_leangrpo.grpo.assets import resolve_asset
from megatron_leangrpo.models.flux.config import PRESETS, FluxConfig, from_diffusers_config

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class Architecture:
    """A checked model configuration and where its weights come from."""

    config: FluxConfig
    base: Path | None
    """Pipeline folder; None for random weights."""
    guidance_scale: float | None
    """None for a model that takes no guidance."""
    seed: int

    def build_model(self, device: torch.device) -> torch.nn.Module:
        """Build this rank's share of the transformer and fill it with the base's weights.

        Random weights depend on the seed alone, so that every layout starts from the same model.
        """
        from megatron_leangrpo.models.flux.model import FluxTransformer
        from megatron_leangrpo.models.flux.weight_map import initialise, load_diffusers_state_dict

        with torch.device(device):
            model = FluxTransformer(self.config)
        if self.base is None:
            initialise(model, self.seed)
        else:
            from megatron_leangrpo.models.loading import load_transformer_folder

            _, tensors = load_transformer_folder(self.base / "transformer")
            load_diffusers_state_dict(model, tensors)
        return model


def resolve_architecture(config: RunConfig, needs_weights: bool = True) -> Architecture:
    """Find the base and read its architecture; reads no weights.

    Without `needs_weights` a preset stands in for a base that is not on this machine.
    """
    model, parallel = config.model, config.parallel
    overrides = {
        "params_dtype": DTYPES[model.dtype],
        "recompute_granularity": model.recompute_granularity,
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "sequence_parallel": parallel.sequence_parallel,
    }
    if model.preset is not None and model.preset not in PRESETS:
        raise ValueError(f"model.preset = {model.preset!r} is not one of {sorted(PRESETS)}")
    base = None
    if model.base is not None:
        base = resolve_asset(model.base)
        if base is None and (needs_weights or model.preset is None):
            raise ValueError(
                f"model.base = {model.base!r}: no such folder; give the path of a diffusers "
                "FluxPipeline folder (with transformer/, vae/, text_encoder/ ...) or the name of "
                "an embedded base (flux_digits, flux_shapes)"
            )
    if base is not None:
        from megatron_leangrpo.models.loading import read_transformer_config

        flux = from_diffusers_config(read_transformer_config(base / "transformer"), **overrides)
    elif model.preset is not None:
        flux = PRESETS[model.preset](**overrides)
    else:
        raise ValueError("model.base is not set; give a diffusers FluxPipeline folder")
    guidance = model.guidance_scale if flux.guidance_embeds else None
    return Architecture(flux, base, guidance, config.seed)
