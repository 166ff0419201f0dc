# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What pre-flight finds: mixed versions, clocks, folders that are not shared, what does not fit."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import socket
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_leangrpo.grpo.architecture import resolve_architecture
from megatron_leangrpo.planner import gpus
from megatron_leangrpo.preflight import meeting, network, storage
from megatron_leangrpo.preflight.clock import clock_check, measure_skews
from megatron_leangrpo.preflight.facts import agreement, code_digest, own_facts
from megatron_leangrpo.preflight.meeting import meet, texts_of_all
from megatron_leangrpo.preflight.recipe import check_recipe, checkpoint_bytes, memory_check
from megatron_leangrpo.preflight.storage import check_output, space_check
from tests.grpo import tiny


@pytest.fixture
def config(tmp_path):
    return tiny.tiny_config(tiny.write_prompts(tmp_path))


def test_mixed_versions_and_settings_are_named_with_their_hosts(config):
    here = own_facts(config)
    there = {**here, "host": "node1", "torch": "2.9.0", "driver": "570.1"}
    assert all(check.good for check in agreement([here, {**here, "host": "node1"}]))
    wrong = {check.name: check.found for check in agreement([here, there]) if not check.good}
    assert set(wrong) == {"torch", "driver"}
    assert wrong["torch"] == f"differs: {here['torch']} on {socket.gethostname()}; 2.9.0 on node1"
    other = dataclasses.replace(config, seed=config.seed + 1)
    assert own_facts(other)["settings of the run"] != here["settings of the run"]


def test_one_changed_line_of_the_package_is_other_code(tmp_path, monkeypatch):
    (tmp_path / "module.py").write_text("a = 1\n")
    monkeypatch.setattr("megatron_leangrpo.__file__", str(tmp_path / "__init__.py"))
    before = code_digest()
    assert code_digest() == before
    (tmp_path / "module.py").write_text("a = 2\n")
    assert code_digest() != before


def _exchange(offset: float, folders: list[str]) -> dict:
    rank = dist.get_rank()
    hosts = texts_of_all(f"node{rank} ∅" if rank else "")
    return {
        "hosts": hosts,
        "skews": measure_skews([1], clock=lambda: time.time() + offset * rank),
        "output": check_output(folders[rank], speaks=True, hosts=["node0", "node1"]),
    }


def test_ranks_exchange_texts_clocks_and_files(run_ranks, tmp_path):
    shared, other = tmp_path / "shared", tmp_path / "other"
    shared.mkdir()
    other.mkdir()
    for found in run_ranks(2, _exchange, 30.0, [str(shared / "run")] * 2):
        assert found["hosts"] == ["", "node1 ∅"]
        # The exchange itself takes less than this, also on a busy machine.
        assert abs(found["skews"][1] - 30.0) < 5.0
        assert found["output"].good and "shared by 2 nodes" in found["output"].found
    assert list(shared.iterdir()) == []
    folders = [str(shared / "run"), str(other / "run")]
    for found in run_ranks(2, _exchange_unshared, folders):
        assert not found.good and "does not show the files of node1" in found.found
        assert "file system that all nodes share" in found.found
    assert list(shared.iterdir()) == list(other.iterdir()) == []


def _exchange_unshared(folders: list[str]):
    storage._SECONDS_TO_APPEAR = 0.2
    # The same path on both nodes, each with a file system of its own.
    return check_output(folders[dist.get_rank()], speaks=True, hosts=["node0", "node1"])


def test_clocks_apart_are_named():
    assert clock_check({}, ["node0"]).good
    assert clock_check({2: -0.1}, ["node0", "node0", "node1"]).good
    check = clock_check({2: 7.0, 4: -90.0}, ["node0", "node0", "node1", "node1", "node2"])
    assert not check.good
    assert check.found.startswith("node2 is 90.000 s behind node0; valid: 2 s")


def test_a_folder_that_cannot_be_written_is_named(run_ranks, tmp_path):
    # Also root cannot make a file in /proc.
    (found,) = run_ranks(1, _check_alone, "/proc/run")
    assert not found.good
    assert f"{socket.gethostname()} cannot write into /proc" in found.found


def _check_alone(folder: str):
    meet(5)
    try:
        return check_output(folder, speaks=True, hosts=[socket.gethostname()])
    finally:
        meeting.leave()


def test_a_disk_too_small_for_the_checkpoints_is_found_before(tmp_path, config):
    size = checkpoint_bytes(config, resolve_architecture(config, needs_weights=False))
    assert space_check(str(tmp_path / "run"), size, 5).good
    check = space_check(str(tmp_path / "run"), 2**60, 2)
    assert not check.good and "checkpoint.keep" in check.found


def test_a_run_that_is_continued_needs_room_for_what_it_has_not_written(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    size = free // 3
    assert not space_check(str(tmp_path), size, 5).good
    for step in range(4):
        (tmp_path / "checkpoints" / f"step_{step:06}").mkdir(parents=True)
    check = space_check(str(tmp_path), size, 5)
    assert check.good and "for 1 more checkpoint of" in check.found


def test_a_checkpoint_of_adapters_is_small(config):
    adapted = dataclasses.replace(config, lora=dataclasses.replace(config.lora, rank=1))
    whole, small = (
        checkpoint_bytes(own, resolve_architecture(own, needs_weights=False))
        for own in (config, adapted)
    )
    assert small < whole / 4


def test_what_does_not_fit_is_told_with_what_would(config):
    retain = dataclasses.replace(config, grpo=dataclasses.replace(config.grpo, schedule="retain"))
    architecture = resolve_architecture(config, needs_weights=False)
    device = gpus.PRESETS["h100-80gb"]
    assert memory_check(retain, architecture, 2, device).good

    def on(memory: int):
        return memory_check(retain, architecture, 2, dataclasses.replace(device, memory=memory))

    sizes = [2**n for n in range(16, 36)]
    smallest = next(size for size in sizes if on(size).good)
    check = next(c for c in map(on, reversed(sizes)) if not c.good)
    assert "retain takes" in check.found and "grpo.schedule=" in check.found
    assert "GiB usable on h100-80gb" in check.found
    assert "the least is" in on(smallest // 2**10).found
    assert "no other layout of these 2 ranks fits either" in on(smallest // 2**10).found


def test_a_layout_that_would_fit_is_named_where_the_recipes_own_does_not(config):
    model = dataclasses.replace(config.model, preset="flux_dev", dtype="bfloat16")
    config = dataclasses.replace(config, model=model)
    architecture = resolve_architecture(config, needs_weights=False)
    # 12 billion weights with float32 gradients take 72 GB before anything else.
    check = memory_check(config, architecture, 8, gpus.PRESETS["a100-80gb"])
    assert not check.good
    sizes = re.search(
        r"parallel.tensor_model_parallel_size=(\d) with .*"
        r"parallel.pipeline_model_parallel_size=(\d), grpo.schedule=.* would take",
        check.found,
    )
    assert sizes is not None and sizes.groups() != ("1", "1"), check.found


def test_a_recipe_that_the_ranks_cannot_share_is_refused(config):
    checks = check_recipe(config, world=3, local_ranks=3)
    assert [check.good for check in checks] == [False]
    assert "3 data-parallel ranks" in checks[0].found
    assert all(check.good for check in check_recipe(config, world=2, local_ranks=2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine may be able to")
def test_fp8_where_it_cannot_run_is_refused(config):
    fp8 = dataclasses.replace(config.fp8, recipe="current", backend="transformer_engine")
    model = dataclasses.replace(config.model, dtype="bfloat16")
    checks = check_recipe(dataclasses.replace(config, fp8=fp8, model=model), 2, 2)
    assert [check.good for check in checks] == [False]
    assert "fp8.backend" in checks[0].found and "transformer" in checks[0].found


def test_ranks_that_do_not_come_are_named(monkeypatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launched = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**launched, "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"ranks 1-3 of 4 have not come within 0 s \(those of "):
        meet(0.3)
    assert not dist.is_initialized()


def test_addresses_that_others_cannot_reach_are_named(monkeypatch):
    """HB30: NCCL's syntax, interfaces that are none, and a host name on loopback."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(network.socket, "gethostname", lambda: "localhost")
    network.check_own_address(nodes=1)
    with pytest.raises(ValueError, match=r"the host name localhost resolves to loopback \("):
        network.check_own_address(nodes=2)
    monkeypatch.setattr(network.socket, "gethostname", lambda: "no-such-host.invalid")
    with pytest.raises(ValueError, match="cannot be resolved"):
        network.check_own_address(nodes=2)
    for value, part in (
        ("^lo,docker", r"no interface \^lo .*NCCL's \^ and = are not known to gloo"),
        ("eth99", "no interface eth99"),
        ("lo", "GLOO_SOCKET_IFNAME = lo resolves to loopback"),
    ):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", value)
        with pytest.raises(ValueError, match=part):
            network.check_own_address(nodes=2)


def test_alone_it_prints_a_table_and_goes_on(leangrpo, config, tmp_path, capfd):
    from megatron_leangrpo.preflight import command

    recipe = tiny.write_recipe(config, tmp_path)
    assert not [name for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    with pytest.raises(SystemExit) as good:
        command.main([recipe, "--output=run"])
    assert good.value.code == 0 and not Path("run").exists()
    out = capfd.readouterr().out
    assert out.startswith("pre-flight\n") and "WRONG" not in out
    with pytest.raises(SystemExit) as bad:
        command.main(["--then", "train", recipe, "--output=/proc/run"])
    assert bad.value.code == 2
    outcome = capfd.readouterr()
    assert "WRONG" in outcome.out and "checks failed: output:" in outcome.err
    meeting.leave()
