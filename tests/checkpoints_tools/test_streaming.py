# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""A conversion holds a few tensors in memory, not a model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from megatron_leangrpo.models.common.conversion import Converted, InMemory
from megatron_leangrpo.models.flux.original import weight_rules as original_rules
from megatron_leangrpo.models.flux.weight_map import weight_rules
from tests.checkpoints_tools import published
from tests.models.flux_parity import small_config


class _Counting(InMemory):
    """Counts how often each tensor is read."""

    def __init__(self, tensors: published.Tensors) -> None:
        super().__init__(tensors)
        self.reads = dict.fromkeys(tensors, 0)

    def __getitem__(self, name: str):
        self.reads[name] += 1
        return super().__getitem__(name)


def test_a_conversion_reads_every_tensor_once(flux):
    config = small_config()
    cases = (
        (weight_rules(config), flux),
        (original_rules(config), published.flux_original(flux, config)),
    )
    for rules, tensors in cases:
        source = _Counting(tensors)
        ours = Converted(source, rules, to_ours=True)
        for name in ours:
            ours[name]
        assert set(source.reads.values()) == {1}
        counting = _Counting(dict(ours))
        theirs = Converted(counting, rules, to_ours=False)
        for name in theirs:
            theirs[name]
        assert set(counting.reads.values()) == {1}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_six_gigabytes_convert_in_two_beside_the_largest_file(tmp_path):
    if shutil.disk_usage(tmp_path).free < 25e9:
        pytest.skip("needs 25 GB of free disk")
    result = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.conversion_memory", "--gigabytes", "6"],
        capture_output=True,
        text=True,
        check=True,
        env={"TMPDIR": str(tmp_path), "PATH": "", "OMP_NUM_THREADS": "1"},
    )
    measured = json.loads(result.stdout[result.stdout.index("{") :])
    assert measured["checkpoint_bytes"] >= 6e9 and measured["equal"]
    for step in ("import", "export"):
        assert measured[f"{step}_peak_growth_bytes"] <= measured["allowed_bytes"]
