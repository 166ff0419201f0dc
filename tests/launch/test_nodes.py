# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Runs of two nodes, each a network namespace with two ranks: lost nodes, cut links, Slurm, names.

Every disturbed run must end with the weights of one that nothing happened to.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from checkpoints_tools.exporting import export_weights
from tests.launch import nodes
from tests.launch.nodes import REPOSITORY, Cluster, Node

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# Two ranks a core import megatron in half a minute; a restart does it again.
PATIENCE_SECONDS = 400
ITERATIONS = 4
RECIPE = [
    "flux_tiny",
    f"--grpo.iterations={ITERATIONS}",
    "--grpo.prompts_per_iteration=4",
    "--grpo.group_size=2",
    "--grpo.micro_batch_size=2",
    "--sampling.num_steps=6",
    "--evaluation.num_steps=2",
    "--evaluation.max_prompts=2",
    "--evaluation.samples_per_prompt=2",
    "--evaluation.interval=0",
    "--checkpoint.interval=1",
]
LAUNCHER = ["bash", str(REPOSITORY / "launch" / "torchrun.sh")]


@pytest.fixture(autouse=True)
def needs_nodes() -> None:
    reason = nodes.why_not()
    if reason:
        pytest.skip(reason)


@pytest.fixture
def cluster(tmp_path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as made:
        yield made


def wait_for(
    condition: Callable[[], bool], log: Path, running: Sequence[subprocess.Popen[str]]
) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        has_ended = any(process.poll() is not None for process in running)
        assert not has_ended and time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.02)


def lines(folder: Path) -> int:
    metrics = folder / "run" / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def launch(
    cluster: Cluster, node: Node, folder: Path, *overrides: str, **more: str
) -> subprocess.Popen[str]:
    settings = {
        "NNODES": "2",
        "NODE_RANK": str(node.number),
        "MASTER_ADDR": cluster.nodes[0].address,
        "GPUS_PER_NODE": "2",
        **more,
    }
    command = [*LAUNCHER, *RECIPE, "--output=run", *overrides]
    return node.start(command, settings, folder / f"log{node.number}", folder)


def finish(processes: list[subprocess.Popen[str]], folder: Path) -> None:
    for number, process in enumerate(processes):
        status = process.wait(timeout=PATIENCE_SECONDS)
        assert status == 0, (number, (folder / f"log{number}").read_text()[-4000:])


def export(folder: Path) -> bytes:
    """The final weights, averaged and not, as files that are compared bit for bit."""
    found = b""
    for average in (False, True):
        output = folder / f"average_{average}"
        checkpoint = folder / "run" / "checkpoints" / f"step_{ITERATIONS:06}"
        export_weights(str(checkpoint), str(output), average, 10**9)
        found += b"".join(file.read_bytes() for file in sorted(output.glob("*.safetensors")))
    assert found
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> bytes:
    """The weights of four ranks on one node."""
    folder = tmp_path_factory.mktemp("undisturbed")
    outcome = subprocess.run(
        [*LAUNCHER, *RECIPE, "--output=run"],
        env={**os.environ, "GPUS_PER_NODE": "4"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert outcome.returncode == 0, outcome.stderr
    return export(folder)


def test_a_node_that_is_lost_and_replaced_continues_the_run(cluster, undisturbed, tmp_path):
    running = [launch(cluster, node, tmp_path) for node in cluster.nodes]
    wait_for(lambda: lines(tmp_path) >= 2, tmp_path / "log0", running)
    cluster.nodes[1].kill()
    running[1] = launch(cluster, cluster.nodes[1], tmp_path)
    finish(running, tmp_path)
    log = (tmp_path / "log0").read_text()
    assert log.count("pre-flight\n") == 2 and "resumed after iteration" in log
    assert export(tmp_path) == undisturbed


def test_where_one_node_is_enough_a_run_goes_on_without_one_that_is_lost_for_good(
    cluster, tmp_path
):
    """With NNODES=1:2, at half the ranks, from the newest checkpoint."""
    running = [launch(cluster, node, tmp_path, NNODES="1:2") for node in cluster.nodes]
    wait_for(lambda: lines(tmp_path) >= 2, tmp_path / "log0", running)
    cluster.nodes[1].kill()
    finish(running[:1], tmp_path)
    log = (tmp_path / "log0").read_text()
    first, second = log.split("pre-flight\n")[1:]
    assert "4 on 2 nodes" in first and "2 on 1 node" in second
    assert "resumed after iteration" in second and "data parallel 2" in second
    rows = [json.loads(r) for r in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == list(range(1, ITERATIONS + 1))


def test_a_link_that_is_cut_until_the_ranks_give_up_continues_the_run(
    cluster, undisturbed, tmp_path
):
    # Long enough for a step on a busy machine; what is lost on the way is only missed after it.
    patience = "--parallel.timeout_seconds=20"
    running = [launch(cluster, node, tmp_path, patience) for node in cluster.nodes]
    wait_for(lambda: lines(tmp_path) >= 2, tmp_path / "log0", running)

    def failures() -> int:
        return (tmp_path / "log0").read_text().count("error on rank")

    # On a starved machine ranks may have missed one another while they started.
    before = failures()
    cluster.cut()
    wait_for(lambda: failures() > before, tmp_path / "log0", running)
    cluster.restore()
    finish(running, tmp_path)
    assert "resumed after iteration" in (tmp_path / "log0").read_text()
    assert export(tmp_path) == undisturbed


SRUN = """#!/usr/bin/env python3
import os, signal, subprocess, sys
words = sys.argv[sys.argv.index("bash"):]
names, folder = os.environ["FAKE_NODES"].split(), os.environ["FAKE_FOLDER"]
tasks = []
for number, name in enumerate(names):
    inside = f'hostname node{number}; mount --bind {folder}/hosts{number} /etc/hosts; exec "$@"'
    tasks.append(subprocess.Popen(
        ["ip", "netns", "exec", name, "unshare", "--mount", "--uts", "bash", "-ec", inside, "task",
         *words],
        env={**os.environ, "SLURM_NODEID": str(number)}))
def forward(number, frame):
    for task in tasks:
        task.send_signal(number)
signal.signal(signal.SIGTERM, forward)
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = """#!/usr/bin/env bash
case "$1" in
  show) printf 'node0\\nnode1\\n' ;;
  requeue) echo "$2" >>"$FAKE_FOLDER/requeued" ;;
esac
"""


def test_a_slurm_job_that_is_preempted_is_requeued_and_continues(cluster, undisturbed, tmp_path):
    commands = tmp_path / "commands"
    commands.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    job = {
        **os.environ,
        "PATH": f"{commands}:{os.environ['PATH']}",
        "FAKE_NODES": " ".join(node.name for node in cluster.nodes),
        "FAKE_FOLDER": str(tmp_path),
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_SUBMIT_DIR": str(REPOSITORY),
        "GPUS_PER_NODE": "2",
    }
    script = ["bash", str(REPOSITORY / "launch" / "slurm.sbatch"), *RECIPE, "--output=run"]

    def submit(restarts: int) -> subprocess.Popen[str]:
        environment = {**job, "SLURM_RESTART_COUNT": str(restarts)}
        with (tmp_path / "log0").open("a") as log:
            return subprocess.Popen(
                script, env=environment, cwd=tmp_path, stdout=log, stderr=log, text=True
            )

    first = submit(0)
    wait_for(lambda: lines(tmp_path) >= 2, tmp_path / "log0", [first])
    first.send_signal(signal.SIGTERM)
    assert first.wait(timeout=PATIENCE_SECONDS) == 0, (tmp_path / "log0").read_text()[-4000:]
    assert (tmp_path / "requeued").read_text() == "4711\n"
    assert "stopped by SIGTERM after iteration" in (tmp_path / "log0").read_text()
    finish([submit(1)], tmp_path)
    assert (tmp_path / "requeued").read_text() == "4711\n"
    assert export(tmp_path) == undisturbed
    rows = [json.loads(r) for r in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == list(range(1, ITERATIONS + 1))


def test_a_host_name_on_loopback_hinders_no_run_and_is_named_where_it_would(tmp_path):
    """HB30: /etc/hosts of each node says that its own name is 127.0.1.1."""
    with Cluster(tmp_path, host_name_on_loopback=True) as cluster:
        began = time.monotonic()
        by_name = launch(cluster, cluster.nodes[0], tmp_path, MASTER_ADDR="node0")
        assert by_name.wait(timeout=60) == 2
        bare = [
            sys.executable,
            str(REPOSITORY / "launch" / "preflight.py"),
            *RECIPE,
            "--output=run",
        ]
        ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                 "MASTER_ADDR": cluster.nodes[0].address, "MASTER_PORT": "29511"}  # fmt: skip
        checked = cluster.nodes[0].start(bare, ranks, tmp_path / "log0", tmp_path)
        assert checked.wait(timeout=60) == 2
        log = (tmp_path / "log0").read_text()
        assert "MASTER_ADDR = node0 resolves to loopback (127.0.1.1)" in log
        assert "the host name node0 resolves to loopback (127.0.1.1)" in log
        assert "set GLOO_SOCKET_IFNAME" in log and cluster.nodes[0].interface in log
        assert time.monotonic() - began < 60
        # The address alone is enough: the interface is found from the route.
        short = "--grpo.iterations=1"
        finish([launch(cluster, node, tmp_path, short) for node in cluster.nodes], tmp_path)
