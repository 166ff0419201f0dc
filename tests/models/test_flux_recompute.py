# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Activation recomputation changes what a graph keeps and nothing else."""

from __future__ import annotations

import pytest
import torch

from megatron_leangrpo import platform
from megatron_leangrpo.models.flux.model import FluxTransformer
from megatron_leangrpo.models.flux.weight_map import export_diffusers_gradients, initialise
from tests.models.flux_parity import (
    finalize_gradients,
    make_inputs,
    small_config,
    wrap_data_parallel,
)

GRANULARITIES = ("none", "selective", "full")


def _saved_bytes_and_gradients(
    tensor_parallel: int, sequence_parallel: bool
) -> dict[str, tuple[int, torch.Tensor, dict[str, torch.Tensor]]]:
    platform.initialize_distributed(tensor_parallel)
    results = {}
    for granularity in GRANULARITIES:
        config = small_config(
            tensor_model_parallel_size=tensor_parallel,
            sequence_parallel=sequence_parallel,
            recompute_granularity=granularity,
        )
        model = FluxTransformer(config)
        initialise(model, seed=5)
        wrapped = wrap_data_parallel(model)
        inputs = make_inputs(config)
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        storages: dict[int, int] = {}

        def keep(tensor, storages=storages, weights=weights):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            velocity = wrapped(inputs.latents, inputs.timestep, inputs.prompt, inputs.grid)
        velocity.backward(inputs.velocity_grad)
        finalize_gradients(wrapped)
        saved = sum(storages.values())
        results[granularity] = (saved, velocity.detach(), export_diffusers_gradients(wrapped))
    return results


@pytest.mark.parametrize(("ranks", "sequence_parallel"), [(1, False), (2, True)])
def test_recomputation_is_bitwise_and_keeps_less(run_ranks, ranks, sequence_parallel):
    for results in run_ranks(ranks, _saved_bytes_and_gradients, ranks, sequence_parallel):
        saved_none, velocity, gradients = results["none"]
        for granularity in ("selective", "full"):
            assert torch.equal(results[granularity][1], velocity)
            other = results[granularity][2]
            assert all(torch.equal(other[name], gradients[name]) for name in gradients), granularity
        assert results["full"][0] < results["selective"][0] < saved_none
