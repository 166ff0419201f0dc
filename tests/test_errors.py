# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Exit status and message of a command, alone and on several ranks."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_leangrpo.errors import run_command

REPOSITORY = Path(__file__).parents[1]
HINT = " (LEANGRPO_TRACEBACK=1 shows where)\n"
LAUNCHER = REPOSITORY / "launch" / "run_ranks.py"

# Mostly imports nothing heavy, so that a test of the launcher is about the launcher.
RANK = """
import os, signal, sys, time
from megatron_leangrpo.errors import run_command
rank, case = int(os.environ["RANK"]), sys.argv[1]
def command():
    if case == "all ranks refuse":
        raise ValueError("grpo.group_size is 7; valid: 6, 8")
    if case == "rank 1 fails and the others wait for it":
        import torch
        import torch.distributed
        torch.distributed.init_process_group("gloo")
        if rank == 0:
            torch.distributed.all_reduce(torch.ones(1))
    if case.startswith("rank 1 fails") and rank == 1:
        raise RuntimeError("reward 'ocr' gave nan")
    if case == "rank 1 is killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if case == "ok":
        return
    if case == "interrupted":
        print("started", flush=True)
    time.sleep(60)
    raise RuntimeError("must have been stopped")
sys.exit(run_command(command))
"""


def raising(error: BaseException):
    def command() -> None:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ValueError("key is 1; valid: 2"), 2, "leangrpo: error: key is 1; valid: 2\n"),
        (argparse.ArgumentError(None, "no such key"), 2, "leangrpo: error: no such key\n"),
        (KeyboardInterrupt(), 130, "leangrpo: interrupted\n"),
        (KeyboardInterrupt("interrupted, saved"), 130, "leangrpo: interrupted, saved\n"),
        (
            RuntimeError("lost\nException raised from x at y.cpp:1\nframe #0"),
            1,
            "leangrpo: error: lost" + HINT,
        ),
        (KeyError("k"), 1, "leangrpo: error: KeyError: 'k'" + HINT),
        (
            AssertionError(),
            1,
            "leangrpo: error: AssertionError (LEANGRPO_TRACEBACK=1 shows where)\n",
        ),
    ],
)
def test_an_exception_becomes_one_message_and_a_status(error, status, message, capsys, monkeypatch):
    monkeypatch.delenv("LEANGRPO_TRACEBACK", raising=False)
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    try:
        assert run_command(raising(error)) == status
    finally:
        signal.signal(signal.SIGINT, handlers[0])
        signal.signal(signal.SIGTERM, handlers[1])
    assert capsys.readouterr().err == message


def test_success_is_zero_and_prints_nothing(capsys):
    assert run_command(lambda: None) == 0
    assert run_command(lambda: 3) == 3
    assert capsys.readouterr().err == ""


def test_the_traceback_is_shown_on_request(capsys, monkeypatch):
    monkeypatch.setenv("LEANGRPO_TRACEBACK", "1")
    run_command(raising(ValueError("bad")))
    error = capsys.readouterr().err
    assert error.startswith("Traceback")
    assert error.endswith("leangrpo: error: bad\n")


def test_the_launcher_finds_the_message_where_it_looks(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0" / "error.json"))
    (tmp_path / "0").mkdir()
    assert run_command(raising(ValueError("first"))) == 2
    assert "first" in json.loads((tmp_path / "0" / "error.json").read_text())["message"]["message"]
    # The second rank of the node to fail says nothing.
    assert run_command(raising(ValueError("second"))) == 2
    assert capsys.readouterr().err.count("leangrpo:") == 1


def start_ranks(tmp_path: Path, case: str) -> subprocess.Popen:
    program = tmp_path / "rank.py"
    program.write_text(RANK)
    command = [sys.executable, str(LAUNCHER), "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [*command, str(program), case],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "LEANGRPO_TRACEBACK": ""},
        # A process group of its own, which a terminal's Ctrl-C would reach as a whole.
        start_new_session=True,
    )


@pytest.mark.parametrize(
    ("case", "status", "message"),
    [
        ("ok", 0, ""),
        ("all ranks refuse", 2, "leangrpo: error: grpo.group_size is 7; valid: 6, 8\n"),
        (
            "rank 1 fails",
            1,
            "leangrpo: error on rank 1: reward 'ocr' gave nan" + HINT,
        ),
        (
            "rank 1 fails and the others wait for it",
            1,
            "leangrpo: error on rank 1: reward 'ocr' gave nan" + HINT,
        ),
        ("rank 1 is killed", 137, "leangrpo: error: rank 1 was killed by SIGKILL\n"),
    ],
)
def test_ranks_end_with_one_message_and_its_status(tmp_path, case, status, message):
    process = start_ranks(tmp_path, case)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (status, message)


def test_control_c_ends_all_ranks_with_one_line(tmp_path):
    process = start_ranks(tmp_path, "interrupted")
    assert [process.stdout.readline() for _ in range(2)] == ["started\n"] * 2
    os.killpg(process.pid, signal.SIGINT)
    started = time.monotonic()
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (130, "leangrpo: interrupted\n")
    # The launcher's patience with ranks that do not stop is 30 s.
    assert time.monotonic() - started < 20
