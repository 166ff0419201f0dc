# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The token counts of published videos on four ranks: one narrow block, the published ratios."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from megatron_leangrpo import platform
from megatron_leangrpo.grpo.memory import peak_allocated_bytes
from megatron_leangrpo.models.common import transformer
from megatron_leangrpo.models.common.weights import initialise
from megatron_leangrpo.models.wan.config import wan_tiny
from megatron_leangrpo.models.wan.model import WanTransformer
from megatron_leangrpo.models.wan.weight_map import weight_rules
from megatron_leangrpo.parallel import tokens
from tests.models.flux_parity import finalize_gradients, worst, wrap_data_parallel
from tests.models.wan_parity import gradients, make_inputs

pytestmark = pytest.mark.slow
# Four heads, and MLPs 5.83 times as wide as the 1.3B's stream.
SIZES = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 372}
# 240 x 416 x 33 frames, of whose 3510 tokens four ranks leave two over, and 480 x 832 x 81: 32760.
SHORT, LONG = (9, 15, 26), (21, 30, 52)
GIB = 2**30


def _large_pads(x: torch.Tensor, length: int) -> torch.Tensor:
    pads = torch.linspace(-1e6, 1e6, x[0].numel()).to(x.dtype).view_as(x[0])
    return torch.cat((x, pads.expand(length - x.shape[0], *pads.shape)))


def _run(ranks: int, grid: tuple[int, int, int]) -> dict[str, torch.Tensor]:
    """The velocity and full gradients, on rank 0."""
    platform.initialize_distributed(ranks)
    config = wan_tiny(**SIZES, tensor_model_parallel_size=ranks, sequence_parallel=True)
    model = WanTransformer(config)
    initialise(model, weight_rules(config), seed=5)
    wrapped, inputs = wrap_data_parallel(model), make_inputs(config, grid, batch=1)
    wrapped.zero_grad_buffer()
    velocity = wrapped(inputs.latents, inputs.timestep, inputs.prompt, grid)
    velocity.backward(inputs.velocity_grad)
    finalize_gradients(wrapped)
    found = {"velocity": velocity.detach(), **gradients(wrapped)}
    return found if platform.rank() == 0 else {}


def _with_pads(ranks: int) -> tuple[dict[str, torch.Tensor], list[str]]:
    """What a short video gives, and what of it pads change."""
    clean = _run(ranks, SHORT)
    with (
        mock.patch.object(transformer, "pad_tokens", _large_pads),
        mock.patch.object(tokens, "pad_tokens", _large_pads),
    ):
        spoilt = _run(ranks, SHORT)
    return clean, [name for name in clean if not torch.equal(clean[name], spoilt[name])]


def test_3510_tokens_are_those_of_one_rank_and_large_numbers_in_their_pads_change_no_bit(run_ranks):
    (found, changed), *_ = run_ranks(4, _with_pads, 4, timeout_seconds=600)
    assert found["velocity"].shape[1] == 3510 and changed == []
    [alone] = run_ranks(1, _run, 1, SHORT)
    # Matrix products over a quarter of the features, added up in another order.
    error, tensor = worst(found, alone)
    assert error < 1e-5, tensor


def _peak(ranks: int) -> tuple[dict[str, torch.Tensor], int]:
    found: dict[str, torch.Tensor] = {}
    peak = peak_allocated_bytes(lambda: found.update(_run(ranks, LONG)))
    return found, peak


def test_32760_tokens_are_sharded_over_four_ranks_in_little_memory(run_ranks):
    results = run_ranks(4, _peak, 4, timeout_seconds=1200)
    assert all(peak < GIB // 2 for _, peak in results), [peak for _, peak in results]
    assert all(tensor.isfinite().all() for tensor in results[0][0].values())
