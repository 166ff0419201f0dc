# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Delayed scales over pipeline stages: a block's are found by its name wherever it is."""

from pathlib import Path

import torch

from megatron_leangrpo import platform
from megatron_leangrpo.models.common.fp8 import use_fp8
from megatron_leangrpo.models.flux.family import FAMILY as FLUX
from megatron_leangrpo.precision.recipe import Fp8Settings
from megatron_leangrpo.precision.scaling import (
    delayed_scales,
    load_scales,
    renew_scales,
    sharded_scales,
)
from tests.models.flux_parity import small_config

Scales = dict[str, torch.Tensor]
# Tensor and pipeline parallel; the other ranks are data parallel.
LAYOUTS = [(1, 2), (1, 1), (1, 4), (2, 2)]
# The largest number of the last three layouts: 2 ** layout on each rank of a stage, times its
# number there from 1. The third one's is that of a checkpoint's history.
LARGEST = [2, 8, 8, 16]


def _model(layout: tuple[int, int]) -> torch.nn.Module:
    """Four blocks, the inner two of which are in FP8: of four stages two have none."""
    tensor, stages = layout
    platform.initialize_distributed(tensor, pipeline_model_parallel_size=stages)
    sizes = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": stages}
    model = FLUX.build(small_config(**sizes))
    use_fp8(model, Fp8Settings("delayed", amax_history_len=3, first_last_blocks_bf16=1))
    return model


def _found(model: torch.nn.Module) -> Scales:
    return {name: scales.scale.clone() for name, scales in delayed_scales(model).items()}


def _renewed_and_resharded(folder: str) -> list[tuple[Scales, Scales]]:
    """The scales at each layout, as they come from the one before it and renewed."""
    from megatron.core import dist_checkpointing

    results = []
    for number, layout in enumerate(LAYOUTS):
        model = _model(layout)
        with platform.host_mode():
            if number:
                state = {"fp8": sharded_scales(model)}
                stored = dist_checkpointing.load(state, f"{folder}/{number}")
                load_scales(model, stored.get("fp8", {}))
        loaded = _found(model)
        for scales in delayed_scales(model).values():
            seen = 2**number * (1 + platform.group_rank(platform.amax_group()))
            scales.amax_history[0] = seen * 2.0 ** torch.arange(len(scales.scale))
        renew_scales(model)
        if platform.rank() == 0:
            Path(f"{folder}/{number + 1}").mkdir()
        torch.distributed.barrier()
        with platform.host_mode():
            dist_checkpointing.save({"fp8": sharded_scales(model)}, f"{folder}/{number + 1}")
        results.append((loaded, _found(model)))
    return results


def test_scales_are_those_of_a_block_at_every_layout(run_ranks, tmp_path):
    ranks = run_ranks(4, _renewed_and_resharded, str(tmp_path))
    before: Scales = {}
    for number, largest in enumerate(LARGEST):
        renewed: Scales = {}
        for results in ranks:
            loaded, own = results[number]
            assert number == 0 or all(torch.equal(loaded[n], before[n]) for n in loaded)
            for scale in own.values():
                assert torch.equal(scale, 448 / largest / 2.0 ** torch.arange(len(scale)))
            renewed |= own
        assert set(renewed) == {"double_blocks.1.fp8_scales", "single_blocks.0.fp8_scales"}
        before = renewed
