# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Models in FP8: which linears, over tensor-parallel ranks too, and what travels between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from megatron_leangrpo import platform
from megatron_leangrpo.models.common.fp8 import fp8_blocks, use_fp8
from megatron_leangrpo.models.common.weights import initialise
from megatron_leangrpo.models.flux.family import FAMILY as FLUX
from megatron_leangrpo.models.flux.model import FluxTransformer
from megatron_leangrpo.models.flux.weight_map import export_diffusers_gradients
from megatron_leangrpo.models.wan.family import FAMILY as WAN
from megatron_leangrpo.overlap import collectives
from megatron_leangrpo.overlap.settings import OverlapSettings
from megatron_leangrpo.overlap.transport import TorchTransport
from megatron_leangrpo.precision.recipe import Fp8Settings
from megatron_leangrpo.precision.scaling import (
    delayed_scales,
    recording_scales,
    renew_scales,
)
from tests.models.flux_parity import (
    finalize_gradients,
    make_inputs,
    relative_l2,
    small_config,
    worst,
    wrap_data_parallel,
)
from tests.precision.stand_in import transformer_engine

# Heads and features whose shards divide by MXFP8's 32 numbers: blocks are those of one rank.
SIZES = {"hidden_size": 128, "axes_dims_rope": (8, 12, 12)}


@pytest.fixture
def alone() -> None:
    platform.initialize_distributed(1)


def fp8_linears(model: torch.nn.Module, first_last: int = 0) -> list[torch.nn.Module]:
    return [linear for linears in fp8_blocks(model, first_last).values() for linear in linears]


def names_of(model: torch.nn.Module, first_last: int = 0) -> set[str]:
    names = {module: name for name, module in model.named_modules()}
    return {names[linear] for linear in fp8_linears(model, first_last)}


def test_token_linears_of_the_blocks_are_in(alone):
    flux = FLUX.build(small_config())
    double = ("attn.linear_qkv", "attn.added_linear_qkv", "attn.linear_proj")
    double += ("attn.added_linear_proj", "img_mlp.linear_fc1", "img_mlp.linear_fc2")
    double += ("txt_mlp.linear_fc1", "txt_mlp.linear_fc2")
    single = ("linear_qkv", "linear_fc1", "linear_out")
    first, second = ({f"double_blocks.{n}.{name}" for name in double} for n in range(2))
    third, fourth = ({f"single_blocks.{n}.{name}" for name in single} for n in range(2))
    assert names_of(flux) == first | second | third | fourth
    assert names_of(flux, first_last=1) == second | third
    with pytest.raises(ValueError, match="leaves none of the 4 blocks in FP8; valid: 0 to 1"):
        fp8_linears(flux, 2)

    wan = WAN.build(WAN.presets["wan_tiny"](num_layers=1))
    # The text's keys and values, the modulation and the head are not.
    expected = ("self_attn.linear_qkv", "self_attn.linear_proj", "cross_attn.linear_q")
    expected += ("cross_attn.linear_proj", "ffn.linear_fc1", "ffn.linear_fc2")
    assert names_of(wan) == {f"blocks.0.{name}" for name in expected}


def test_kernels_need_features_that_are_multiples_of_theirs(alone):
    model = FLUX.build(small_config(**SIZES))
    with transformer_engine():
        use_fp8(model, Fp8Settings("mxfp8", backend="transformer_engine"))
        kernels = [getattr(linear, "fp8", None) for linear in fp8_linears(model)]
        assert all(type(one).__name__ == "TransformerEngineOperands" for one in kernels)
        model = FLUX.build(small_config(hidden_size=80, axes_dims_rope=(4, 8, 8)))
        with pytest.raises(ValueError, match=r"must be multiples of 32; valid: fp8\.recipe"):
            use_fp8(model, Fp8Settings("mxfp8", backend="transformer_engine"))


def _run(ranks: int, cases: list[tuple[str, str, str]]) -> dict:
    """Velocity, gradients, dtypes gathered in the forward, next scales; by recipe and overlap."""
    platform.initialize_distributed(ranks)
    results = {}
    for case in cases:
        recipe, mode, recompute = case
        config = small_config(
            tensor_model_parallel_size=ranks,
            sequence_parallel=True,
            overlap=OverlapSettings(mode),
            recompute_granularity=recompute,
            **SIZES,
        )
        model = FluxTransformer(config)
        use_fp8(model, Fp8Settings(recipe))
        initialise(model, FLUX.weight_rules(config), seed=0)
        # Rows of padding are rows like others to a maximum: here there are none.
        inputs = make_inputs(config, grid=(2, 4), text_tokens=4)
        wrapped = wrap_data_parallel(model)
        arguments = (inputs.latents, inputs.timestep, inputs.prompt, inputs.grid)
        for scales in delayed_scales(model).values():
            # An ulp in a scale of its own would move numbers over edges everywhere.
            scales.scale[0::2], scales.scale[1::2] = 64.0, 1024.0
        gathered: list[torch.dtype] = []
        with _watched(gathered), recording_scales(model):
            velocity = wrapped(*arguments)
        wrapped.zero_grad_buffer()
        velocity.backward(inputs.velocity_grad)
        finalize_gradients(wrapped)
        renew_scales(model)
        renewed = [scales.scale.clone() for scales in delayed_scales(model).values()]
        gradients = export_diffusers_gradients(wrapped)
        results[case] = velocity.detach(), gradients, set(gathered), renewed
    return results


@contextmanager
def _watched(gathered: list[torch.dtype]) -> Iterator[None]:
    """Notes the dtype of every gather, whole or in slices."""
    whole, slices = collectives.all_gather, TorchTransport.exchange

    def all_gather(x, group):
        gathered.append(x.dtype)
        return whole(x, group)

    def exchange(self, send, receive, message, layer):
        if layer.endswith("(gather)"):
            gathered.append(send.dtype)
        return slices(self, send, receive, message, layer)

    with (
        mock.patch.object(collectives, "all_gather", all_gather),
        mock.patch.object(TorchTransport, "exchange", exchange),
    ):
        yield


@pytest.mark.parametrize("recipe", ["delayed", pytest.param("mxfp8", marks=pytest.mark.slow)])
def test_two_ranks_compute_what_one_does_and_gather_bytes(run_ranks, recipe):
    (alone,) = run_ranks(1, _run, 1, [(recipe, "off", "none")])
    modes = [("off", "none"), ("bulk", "none"), ("flash", "selective")]
    cases = [(recipe, *mode) for mode in modes]
    results, others = run_ranks(2, _run, 2, cases)
    for case, (velocity, gradients, gathered, scales) in results.items():
        assert gathered == {torch.uint8}, case
        assert torch.equal(velocity, others[case][0])
        expected = alone[case[0], "off", "none"]
        for ours, theirs, whole in zip(scales, others[case][3], expected[3], strict=True):
            # Of all ranks: a weight's shard has a smaller maximum than the weight.
            assert torch.equal(ours, theirs)
            assert relative_l2(ours, whole) < 1e-3
        # Sums in another order move a number over the edge between two codes now and then; the
        # rounding to FP8 itself changes the velocity by 1e-2, a wrong factor by 1e-1 and more.
        assert relative_l2(velocity, expected[0]) < 1e-3, case
        error, tensor = worst(gradients, expected[1])
        assert error < 5e-3, (case, tensor)


def _current(ranks: int) -> list[torch.Tensor]:
    return [_run(ranks, [("current", mode, "none")])["current", mode, "none"][0] for mode in MODES]


MODES = ("off", "flash")


@pytest.mark.slow
def test_scales_of_current_scaling_are_common_to_ranks_that_share_the_tokens(run_ranks):
    whole, cut = run_ranks(2, _current, 2)[0]
    assert relative_l2(cut, whole) < 1e-3
