# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The modes of `leangrpo overlap measure` on real ranks, in virtual time and once in real time."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megatron_leangrpo.overlap.calibrate import Calibration
from megatron_leangrpo.overlap.cost_model import Costs
from megatron_leangrpo.overlap.emulated_link import VirtualClock
from megatron_leangrpo.overlap.measure import (
    Setting,
    exposed_seconds,
    joined,
    play,
)
from megatron_leangrpo.overlap.transport import TorchTransport

COSTS = Costs(ranks=4, compute=0.050, hop=0.030)


LINEARS = Setting(COSTS, chunks=4, sub_slices=4, repeats=1)
HEADS = Setting(COSTS, chunks=1, sub_slices=4, repeats=1, collective="all-to-all")


def _virtual():
    from megatron_leangrpo import platform

    platform.initialize_distributed(4)
    transport = TorchTransport(dist.group.WORLD, "measure", 60)
    return [play(setting, transport, VirtualClock) for setting in (LINEARS, HEADS)]


def test_the_modes_expose_what_the_cost_model_says(run_ranks):
    linears, heads = zip(*run_ranks(4, _virtual))
    spans = joined(linears)
    exposed = {name: exposed_seconds(of_mode, COSTS) for name, of_mode in spans.items()}
    assert exposed == pytest.approx(
        {"none": 0.090, "slicing (4)": 0.0225, "flash (ring, 1)": 0.0, "flash (ring, 4)": 0.0}
    )
    spans = joined(heads)
    exposed = {name: exposed_seconds(of_mode, COSTS) for name, of_mode in spans.items()}
    assert exposed == pytest.approx({"none": 0.090, "flash (4 groups)": 0.0225})
    sent = [span.slice for span in spans["flash (4 groups)"] if span.kind == "send"]
    # Three messages there and three back, of every group and rank.
    assert sorted(sent) == sorted([0, 1, 2, 3] * 6 * 4)


def test_a_calibration_is_read_as_it_was_written_and_anything_else_is_named(tmp_path):
    path = tmp_path / "calibration.json"
    calibration = Calibration("CPU", "float32", 1e11, {"1": 1.0, "4": 0.9}, 1.1, 1e10, 1e9, 1e-5)
    calibration.save(path)
    assert Calibration.load(path) == calibration
    path.write_text('{"device": "CPU"}')
    with pytest.raises(ValueError, match=r"calibration\.json is no calibration"):
        Calibration.load(path)
