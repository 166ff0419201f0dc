# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What an installation carries and declares, and the scripts that make one."""

import ast
import importlib.metadata
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "megatron_leangrpo"
SCRIPTS = sorted([*REPOSITORY.glob("launch/**/*.sh"), REPOSITORY / ".ci" / "run"])

# Where the import name is not the distribution's name.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "yaml": "PyYAML",
    "megatron": "megatron-core",
    "transformer_engine": "transformer-engine",
}
# Parts of NVIDIA's containers that no registry has; without them torch computes the same.
OF_CONTAINERS = {"apex", "fused_weight_gradient_mlp_cuda"}


def requirements() -> set[str]:
    """Normalised names of everything the package declares, extras included."""
    declared = importlib.metadata.requires("megatron-leangrpo")
    return {re.split(r"[\[<>=!~; ]", line, maxsplit=1)[0].lower() for line in declared}


def third_party_imports(folder: Path) -> set[str]:
    names = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                names.add(node.module.split(".")[0])
    ours = {"megatron_leangrpo", "checkpoints_tools", "tests"}
    return names - set(sys.stdlib_module_names) - ours


@pytest.mark.parametrize("folder", ["megatron_leangrpo", "checkpoints_tools", "tests"])
def test_everything_imported_is_declared(folder):
    imported = {DISTRIBUTIONS.get(n, n).lower() for n in third_party_imports(REPOSITORY / folder)}
    assert imported - OF_CONTAINERS - requirements() == set()


def test_the_command_is_the_command_line_module():
    (script,) = [
        entry
        for entry in importlib.metadata.entry_points(group="console_scripts")
        if entry.name == "leangrpo"
    ]
    assert script.value == "megatron_leangrpo.cli:main"


def test_supported_megatron_and_python_are_declared():
    metadata = importlib.metadata.metadata("megatron-leangrpo")
    assert metadata["Requires-Python"] == ">=3.11"
    (megatron,) = [
        line
        for line in importlib.metadata.requires("megatron-leangrpo")
        if line.startswith("megatron-core")
    ]
    assert set(megatron.removeprefix("megatron-core").split(",")) == {">=0.16.1", "<0.20"}


def test_an_installation_carries_every_file_of_the_package(tmp_path):
    pytest.importorskip("setuptools")
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", str(tmp_path)],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
    )

    def files(root: Path) -> set[str]:
        found = (path for path in root.rglob("*") if path.is_file())
        return {str(path.relative_to(root)) for path in found if path.suffix != ".pyc"}

    assert files(PACKAGE) - files(tmp_path / "megatron_leangrpo") == set()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_and_stop_at_the_first_error(script):
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    text = script.read_text()
    # A sourced file takes the settings of the script that sources it.
    assert "set -euo pipefail" in text or "# Sourced by" in text
    if shutil.which("shellcheck"):
        assert subprocess.run(["shellcheck", "-x", script]).returncode == 0


def test_no_file_that_installs_names_a_registry():
    for file in [*SCRIPTS, REPOSITORY / "setup.py", REPOSITORY / "pyproject.toml"]:
        assert not re.search(r"https?://|index-url|find-links", file.read_text()), file


FAKE_PYTHON = """#!/usr/bin/env bash
# Stands for the Python of .venv: records installations instead of making them.
if [[ "$1 $2 $3" == "-m pip install" ]]; then
  echo "${@: -1}" >>"@LOG@"
  sleep 0.3
  exit $(cat "@STATUS@")
fi
exec "@PYTHON@" "$@"
"""


@pytest.fixture
def checkout(tmp_path):
    """A repository with the real set-up code and an environment that only pretends to install."""
    shutil.copytree(REPOSITORY / "launch", tmp_path / "launch")
    (tmp_path / "setup.py").write_text("version = 1\n")
    (tmp_path / "status").write_text("0")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    fake = FAKE_PYTHON.replace("@PYTHON@", sys.executable)
    for name in ("log", "status"):
        fake = fake.replace(f"@{name.upper()}@", str(tmp_path / name))
    python.write_text(fake)
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return tmp_path


def set_up(checkout: Path) -> subprocess.Popen:
    command = "set -euo pipefail; source launch/setup_env.sh; setup_environment; echo ready"
    return subprocess.Popen(
        ["bash", "-c", command],
        cwd=checkout,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )


def installations(checkout: Path) -> list[str]:
    log = checkout / "log"
    return log.read_text().splitlines() if log.exists() else []


def test_setting_up_twice_installs_once(checkout):
    first = set_up(checkout).communicate(timeout=60)
    second = set_up(checkout).communicate(timeout=60)
    # torch is there already, so the package is all that is installed.
    assert installations(checkout) == [f"{checkout}[ocr,serve,video,parquet,test]"]
    assert "environment ready" in first[1]
    assert second == ("ready\n", "")


def test_two_at_once_install_once_and_both_go_on(checkout):
    both = [set_up(checkout), set_up(checkout)]
    assert [process.communicate(timeout=60)[0] for process in both] == ["ready\n"] * 2
    assert len(installations(checkout)) == 1


def test_a_changed_package_description_installs_again(checkout):
    set_up(checkout).communicate(timeout=60)
    (checkout / "setup.py").write_text("version = 2\n")
    set_up(checkout).communicate(timeout=60)
    assert len(installations(checkout)) == 2


def test_a_failed_installation_ends_with_a_clear_line_and_is_tried_again(checkout):
    (checkout / "status").write_text("1")
    process = set_up(checkout)
    output, error = process.communicate(timeout=60)
    assert (process.returncode, output) == (1, "")
    assert error.splitlines()[-1].startswith("[setup] error: pip could not install")
    (checkout / "status").write_text("0")
    assert set_up(checkout).communicate(timeout=60)[0] == "ready\n"
