# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""A bfloat16 Wan keeps in float32 what diffusers keeps in float32, and trains that way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_leangrpo import platform
from megatron_leangrpo.models.common.modulation import gated_residual
from megatron_leangrpo.models.common.norms import scaled_norm
from megatron_leangrpo.models.common.weights import full_tensors, initialise
from megatron_leangrpo.models.wan.model import WanTransformer
from megatron_leangrpo.models.wan.weight_map import weight_rules
from tests.models.flux_parity import finalize_gradients, relative_l2
from tests.models.wan_parity import (
    diffusers_model,
    diffusers_velocity,
    image_to_video,
    load,
    make_inputs,
    text_to_video,
    unpack,
)

BF16 = torch.bfloat16


def _diffusers_in_bfloat16(folder: Path) -> torch.nn.Module:
    """As a user loads it: only `from_pretrained` keeps the float32 set."""
    from diffusers import WanTransformer3DModel

    diffusers_model(image_to_video()).save_pretrained(folder)
    return WanTransformer3DModel.from_pretrained(folder, torch_dtype=BF16)


def test_pieces_have_the_dtypes_they_have_in_diffusers(single_process, tmp_path):
    expected = {n: p.dtype for n, p in _diffusers_in_bfloat16(tmp_path).named_parameters()}
    model = WanTransformer(image_to_video(params_dtype=BF16))
    exported = full_tensors(model, weight_rules(model.wan_config))
    assert {name: tensor.dtype for name, tensor in exported.items()} == expected
    assert expected["blocks.0.scale_shift_table"] == torch.float32


def test_bfloat16_is_as_close_to_float32_as_diffusers_is(single_process, tmp_path):
    theirs = _diffusers_in_bfloat16(tmp_path)
    inputs = make_inputs(image_to_video())
    exact = diffusers_velocity(diffusers_model(image_to_video()), inputs)
    rounded = inputs.to(BF16)
    model = WanTransformer(image_to_video(params_dtype=BF16))
    load(model, theirs.state_dict())
    velocity = model(rounded.latents, inputs.timestep, rounded.prompt, inputs.grid)
    assert velocity.dtype == BF16
    error = relative_l2(unpack(velocity, inputs.grid), exact)
    # Both round at the same places but one: ours rotates queries and keys before it rounds them.
    assert error < 1.2 * relative_l2(diffusers_velocity(theirs, rounded), exact)


def test_timesteps_are_not_rounded(single_process):
    config = text_to_video(params_dtype=BF16)
    model = WanTransformer(config)
    initialise(model, weight_rules(config), seed=5)
    # In bfloat16 both are 1.
    e = [model.embed_time(torch.tensor([t]))[0] for t in (0.999, 1.0)]
    assert not torch.equal(e[0], e[1])


def test_norms_and_residuals_are_computed_in_float32_and_rounded_once():
    generator = torch.Generator().manual_seed(0)
    x, update = (torch.randn(5, 2, 48, generator=generator).to(BF16) for _ in range(2))
    shift, scale, gate = torch.randn(3, 2, 48, generator=generator)

    exact = torch.nn.functional.layer_norm(x.float(), (48,), eps=1e-6) * scale + shift
    found = scaled_norm(x, scale, shift)
    # One rounding of 2^-9; float32's own differences may tip a few elements to the other side.
    assert found.dtype == BF16 and (found != exact.to(BF16)).float().mean() < 0.01

    exact = x.float() + gate * update.float()
    found = gated_residual(x, gate, update)
    assert found.dtype == BF16 and (found != exact.to(BF16)).float().mean() < 0.01


def _train(tensor_parallel: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Three steps in bfloat16 with megatron's sharded optimizer, gradients in float32."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    platform.initialize_distributed(tensor_parallel)
    config = image_to_video(
        params_dtype=BF16, tensor_model_parallel_size=tensor_parallel, sequence_parallel=True
    )
    model = WanTransformer(config)
    rules = weight_rules(config)
    initialise(model, rules, seed=5)
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True
    )
    wrapped = DistributedDataParallel(model.config, settings, model)
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        weight_decay=0.0,
        bf16=True,
        use_distributed_optimizer=True,
    )
    with platform.host_mode():
        optimizer = get_megatron_optimizer(settings, [wrapped])
    norms, inputs = [], make_inputs(config)
    for _ in range(3):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        velocity = wrapped(inputs.latents, inputs.timestep, inputs.prompt, inputs.grid)
        velocity.backward(inputs.velocity_grad.to(BF16) / platform.dp_size())
        with platform.host_mode():
            finalize_gradients(wrapped)
            _, norm, _ = optimizer.step()
        norms.append(float(norm))
    return norms, full_tensors(model, rules)


def _at_both_layouts() -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    return [_train(tensor_parallel) for tensor_parallel in (1, 2)]


def test_three_steps_of_megatrons_optimizer_do_not_depend_on_the_layout(run_ranks):
    alone, _ = run_ranks(1, _train, 1)[0]
    for (norms, weights), (_, other) in zip(*run_ranks(2, _at_both_layouts)):
        # Rounding in a gradient's norm, and what three steps of 1e-3 make of it.
        assert norms == pytest.approx(alone, rel=2e-2)
        assert norms[2] != norms[0], "the steps changed nothing"
        assert all(torch.equal(weights[name], other[name]) for name in weights), "ranks differ"
        assert weights["scale_shift_table"].dtype == torch.float32
