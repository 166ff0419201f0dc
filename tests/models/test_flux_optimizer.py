# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Three optimizer steps give the same weights and gradient norms in every parallel layout."""

from __future__ import annotations

import pytest
import torch

from megatron_leangrpo import platform
from megatron_leangrpo.models.flux.model import FluxTransformer
from megatron_leangrpo.models.flux.weight_map import (
    export_diffusers_state_dict,
    load_diffusers_state_dict,
)
from tests.models.flux_parity import (
    Inputs,
    Prompt,
    diffusers_model,
    diffusers_velocity,
    finalize_gradients,
    make_inputs,
    relative_l2,
    small_config,
    worst,
    wrap_data_parallel,
)

STEPS = 3
BATCH = 4
LEARNING_RATE = 1e-3
# Below every gradient norm here, so that clipping acts and a wrong norm would show in the weights.
CLIP = 1.0
# Adam divides by the gradient's own size, so rounding in an element whose gradient is nearly zero
# becomes a visible part of a step of 1e-3; the weights themselves are about 0.1.
WEIGHT_TOLERANCE = 1e-4
NORM_TOLERANCE = 1e-5


def _batches() -> list[Inputs]:
    return [make_inputs(small_config(), batch=BATCH, seed=10 + step) for step in range(STEPS)]


def _share(inputs: Inputs, rank: int, size: int) -> Inputs:
    own = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
    prompt = inputs.prompt
    return Inputs(
        inputs.latents[own],
        inputs.timestep[own],
        Prompt(prompt.prompt_embeds[own], prompt.pooled[own], prompt.guidance[own]),
        inputs.grid,
        inputs.velocity_grad[own],
    )


@pytest.fixture(scope="module")
def expected() -> dict:
    """torch's AdamW and clipping on diffusers' model."""
    model = diffusers_model(small_config())
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, betas=(0.9, 0.95), eps=1e-8
    )
    norms = []
    for inputs in _batches():
        optimizer.zero_grad()
        diffusers_velocity(model, inputs).backward(inputs.velocity_grad)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
    return {"start": start, "norms": norms, "weights": dict(model.state_dict())}


def _train(
    tensor_parallel: int, sequence_parallel: bool, distributed_optimizer: bool, start: dict
) -> tuple[list[float], dict[str, torch.Tensor]]:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    platform.initialize_distributed(tensor_parallel)
    model = FluxTransformer(
        small_config(
            tensor_model_parallel_size=tensor_parallel, sequence_parallel=sequence_parallel
        )
    )
    load_diffusers_state_dict(model, start)
    wrapped = wrap_data_parallel(model, distributed_optimizer)
    settings = OptimizerConfig(
        optimizer="adam",
        lr=LEARNING_RATE,
        weight_decay=0.0,
        adam_beta1=0.9,
        adam_beta2=0.95,
        clip_grad=CLIP,
        use_distributed_optimizer=distributed_optimizer,
    )
    with platform.host_mode():
        optimizer = get_megatron_optimizer(settings, [wrapped])
    norms = []
    for inputs in _batches():
        own = _share(inputs, platform.dp_rank(), platform.dp_size())
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        wrapped(own.latents, own.timestep, own.prompt, own.grid).backward(own.velocity_grad)
        with platform.host_mode():
            finalize_gradients(wrapped)
            succeeded, norm, _ = optimizer.step()
        assert succeeded
        norms.append(float(norm))
    return norms, export_diffusers_state_dict(wrapped)


# Tensor parallel, sequence parallel, distributed optimizer.
Layout = tuple[int, bool, bool]


def _of_layouts(layouts: list[Layout], start: dict) -> list:
    return [_train(*layout, start) for layout in layouts]


@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [
        (1, [(1, False, False), (1, False, True)]),
        (2, [(1, False, True), (2, True, True)]),
        (4, [(2, True, True)]),
        pytest.param(2, [(1, False, False), (2, False, False)], marks=pytest.mark.slow),
        pytest.param(4, [(4, True, False), (2, True, False)], marks=pytest.mark.slow),
    ],
)
def test_three_steps_match_torch_on_diffusers_model(run_ranks, expected, ranks, layouts):
    of_ranks = run_ranks(ranks, _of_layouts, layouts, expected["start"])
    for layout, *results in zip(layouts, *of_ranks):
        first = results[0][1]
        for norms, weights in results:
            assert norms == pytest.approx(expected["norms"], rel=NORM_TOLERANCE), layout
            error, name = worst(weights, expected["weights"])
            assert error < WEIGHT_TOLERANCE, (layout, name)
            assert all(torch.equal(weights[name], first[name]) for name in first), "ranks differ"
        assert relative_l2(first["proj_out.weight"], expected["start"]["proj_out.weight"]) > 1e-3
