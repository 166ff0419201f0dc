# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The scripts of launch/ and docker/: clean, clear about bad settings, and presets with reasons."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
LAUNCH = REPOSITORY / "launch"
PRESETS = sorted((LAUNCH / "env").glob("*.sh"))
SCRIPTS = [
    *LAUNCH.glob("*.sh"),
    *PRESETS,
    LAUNCH / "slurm.sbatch",
    REPOSITORY / "docker" / "build.sh",
    REPOSITORY / ".ci" / "run",
]


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs Debian's shellcheck")
def test_the_linter_of_shells_has_nothing_to_say():
    outcome = subprocess.run(
        ["shellcheck", "--external-sources", *SCRIPTS],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert (outcome.returncode, outcome.stdout) == (0, "")


def run(script: str, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    clean = {k: os.environ[k] for k in ("PATH", "HOME") if k in os.environ}
    return subprocess.run(
        ["bash", LAUNCH / script, *arguments],
        env={**clean, "PYTHON": sys.executable, **settings},
        capture_output=True,
        text=True,
        timeout=60,
    )


TWO = {"NNODES": "2", "NODE_RANK": "0", "GPUS_PER_NODE": "1"}


@pytest.mark.parametrize(
    ("arguments", "settings", "parts"),
    [
        ([], {}, ["usage"]),
        (["--grpo.iterations=1"], {}, ["usage"]),
        (["r"], {"NNODES": "0"}, ["NNODES = 0", "MIN:MAX"]),
        (["r"], {"NNODES": "4:2"}, ["NNODES = 4:2", "MIN <= MAX"]),
        (["r"], {"NNODES": "2", "GPUS_PER_NODE": "1"}, ["NODE_RANK is not set", "NNODES = 2"]),
        (["r"], TWO, ["MASTER_ADDR is not set", "node 0"]),
        (["r"], {**TWO, "NODE_RANK": "2", "MASTER_ADDR": "x"}, ["NODE_RANK = 2", "0 to 1"]),
        (["r"], {**TWO, "MASTER_ADDR": "x", "MASTER_PORT": "a"}, ["MASTER_PORT = a"]),
        (["r"], {"GPUS_PER_NODE": "many"}, ["GPUS_PER_NODE = many"]),
        (["r"], {"PRESETS": "h100 h1000"}, ["no preset h1000", "h200 infiniband"]),
        (["r"], {**TWO, "MASTER_ADDR": "127.0.0.1"}, ["resolves to loopback (127.0.0.1)"]),
    ],
)
def test_what_is_wrong_with_a_launch_is_named(arguments, settings, parts):
    outcome = run("torchrun.sh", *arguments, **settings)
    assert outcome.returncode == 2
    assert outcome.stderr.count("\n") == 1 and outcome.stderr.startswith("leangrpo: error: ")
    assert not [part for part in parts if part not in outcome.stderr], outcome.stderr


@pytest.mark.parametrize(
    ("arguments", "part"), [(["flux_tiny"], "--output is missing"), ([], "usage")]
)
def test_what_is_wrong_with_a_job_is_named(arguments, part):
    job = {"SLURM_JOB_ID": "1", "SLURM_SUBMIT_DIR": str(REPOSITORY)}
    outcome = run("slurm.sbatch", *arguments, **job)
    assert outcome.returncode == 2 and part in outcome.stderr
    assert "start it with sbatch" in run("slurm.sbatch", "flux_tiny").stderr


def network(address: str, port: int, node_rank: int, **settings: str) -> tuple[int, str]:
    outcome = subprocess.run(
        [sys.executable, LAUNCH / "network.py", address, str(port), str(node_rank)],
        env={"PATH": os.environ["PATH"], **settings},
        capture_output=True,
        text=True,
    )
    return outcome.returncode, outcome.stdout + outcome.stderr


def own_address() -> str:
    import psutil

    for name, found in psutil.net_if_addrs().items():
        for address in found:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                return f"{name} {address.address}"
    pytest.skip("this machine has no address but loopback")


def test_the_interface_is_found_from_the_route_to_the_master():
    found = own_address()
    address = found.split()[1]
    # Port 0 asks the system for a free one.
    assert network(address, 0, 0) == (0, f"{found}\n")
    assert network(address, 0, 0, GLOO_SOCKET_IFNAME=found.split()[0])[1] == f"{found}\n"


def test_a_port_that_is_taken_and_names_only_nccl_knows_are_named():
    address = own_address().split()[1]
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        status, text = network(address, port, 0)
        assert status == 2 and f"MASTER_PORT = {port} is taken" in text and "another" in text
    status, text = network(address, 0, 0, GLOO_SOCKET_IFNAME="^lo,docker")
    assert status == 2 and "gloo takes names alone, not NCCL's ^ and =" in text
    # 192.0.2.0/24 is reserved for documentation: no machine has an address there for good.
    elsewhere = "192.0.2.77" if address != "192.0.2.77" else "192.0.2.78"
    status, text = network(elsewhere, 0, 0)
    assert status == 2 and "is none of its addresses" in text


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_presets_give_reasons_keep_what_is_set_and_leave_gloo_alone(preset):
    """HB30: NCCL's ^ and = never reach gloo, because no preset sets gloo's interface."""
    lines = preset.read_text().splitlines()
    exports = [index for index, line in enumerate(lines) if line.startswith("export ")]
    assert exports
    for index in exports:
        name, value = re.fullmatch(r'export (\w+)="(.*)"', lines[index]).groups()
        assert name != "GLOO_SOCKET_IFNAME"
        assert value.startswith("${" + name + ":-"), "what the user has set wins"
        above = index - 1
        while lines[above].startswith("export "):
            above -= 1
        assert lines[above].startswith("# ")
    names = [re.match(r"export (\w+)", lines[index])[1] for index in exports]
    asked = "; ".join(f'printf "%s\\n" "${name}"' for name in names)
    kept = subprocess.run(
        ["bash", "-euc", f"source {preset}; {asked}"],
        env=dict.fromkeys(names, "mine"),
        capture_output=True,
        text=True,
        check=True,
    )
    assert kept.stdout.split() == ["mine"] * len(names)
