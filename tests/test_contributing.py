# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Follows CONTRIBUTING.md: writes the files it shows and runs the commands it gives, in a copy."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
DOCUMENT = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")

# A fenced block, and the path that names it as a file, on the line before.
BLOCK = re.compile(r"(?:^ *`(\S+)`:\n\n)?^( *)```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def section(title: str) -> str:
    return DOCUMENT.split(f"\n## {title}\n")[1].split("\n## ")[0]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The package and enough of the tests to add to; large assets are linked."""
    for name in ("megatron_leangrpo", "tests"):
        shutil.copytree(
            REPOSITORY / name,
            tmp_path / name,
            ignore=shutil.ignore_patterns("__pycache__", "assets", "test_*.py"),
        )
    (tmp_path / "megatron_leangrpo" / "assets").symlink_to(REPOSITORY / "megatron_leangrpo/assets")
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    return tmp_path


def walk(title: str, checkout: Path) -> None:
    """Do what a section says, in its order."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    steps = 0
    for path, _, language, body in BLOCK.findall(section(title)):
        steps += 1
        body = textwrap.dedent(body)
        if path:
            file = checkout / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(body, encoding="utf-8")
            continue
        assert language == "bash", f"a {language} block of {title!r} has no path"
        result = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", body],
            cwd=checkout,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, f"{body}\n{result.stdout}\n{result.stderr}"
    assert steps >= 2


def test_adding_a_reward(checkout):
    walk("Add a reward", checkout)


def test_adding_a_schedule(checkout):
    walk("Add a schedule", checkout)
    report = json.loads((checkout / "compare.json").read_text())["schedules"]["frugal"]
    # Rounding of float32 in two orders of the same sum.
    assert report["rel_error"] <= 1e-6


def test_adding_a_recipe(checkout):
    walk("Add a recipe", checkout)


def test_adding_a_model(checkout):
    walk("Add a model", checkout)
    run = checkout / "toy_run"
    assert json.loads((run / "summary.json").read_text())["iterations"] == 1
    assert [folder.name for folder in (run / "checkpoints").iterdir()] == ["step_000001"]


def test_the_code_it_shows_is_in_the_style_it_asks_for(tmp_path):
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    for path, _, language, body in BLOCK.findall(DOCUMENT):
        if language == "python":
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(textwrap.dedent(body), encoding="utf-8")
    for command in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", "."]
        result = subprocess.run(ruff, cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
