# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Holds the code to docs/architecture.md: who may import whom, and what may be slow to import."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "megatron_leangrpo"
DOCUMENT = REPOSITORY / "docs" / "architecture.md"

HEAVY = ("torch", "megatron", "diffusers", "transformers", "matplotlib", "tensorboard", "numpy")


def table() -> dict[str, set[str]]:
    """The rows of the document: part to the parts it may import, in order."""
    rows = re.findall(r"^\| `(\S+)` \|[^|]*\|([^|]*)\|$", DOCUMENT.read_text(), flags=re.MULTILINE)
    return {part: set(re.findall(r"`(\S+?)`", allowed)) for part, allowed in rows}


TABLE = table()
# Folders without code of their own.
DATA = {"assets", "recipes"}


def part_of(module: str) -> str:
    """The row that a dotted module name below the package belongs to; the longest one wins."""
    path = module.replace(".", "/")
    rows = [part for part in TABLE if f"{path}/".startswith(f"{part}/")]
    return max(rows, key=len, default=path.split("/")[0])


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module imported anywhere in a file, inside functions too, except for type checking."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where an import goes"
            # `from package import part` imports a part as much as `import package.part` does.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from imports(node)


def sources() -> list[Path]:
    return [file for file in sorted(PACKAGE.rglob("*.py")) if file != PACKAGE / "__init__.py"]


def violations(file: Path) -> list[str]:
    module = ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
    part = part_of(module)
    found = []
    for imported in imports(ast.parse(file.read_text(encoding="utf-8"))):
        if not imported.startswith("megatron_leangrpo."):
            continue
        other = part_of(imported.removeprefix("megatron_leangrpo."))
        same_folder = other.split("/")[0] == part.split("/")[0]
        if not same_folder and other not in TABLE[part]:
            found.append(f"{module} imports {imported}")
    return found


def test_every_part_of_the_package_has_a_row_and_every_row_a_part():
    parts = {file.relative_to(PACKAGE).with_suffix("").parts[0] for file in sources()}
    rows = {part for part in TABLE if "/" not in part}
    assert parts - DATA == rows
    assert all((PACKAGE / part).exists() or (PACKAGE / f"{part}.py").exists() for part in TABLE)


def test_the_table_lets_imports_go_downwards_only():
    order = list(TABLE)
    for part, allowed in TABLE.items():
        above = {other for other in allowed if order.index(other) <= order.index(part)}
        assert not above, f"{part} may import {above}, which stand above it"


def test_imports_keep_to_the_table():
    assert [line for file in sources() for line in violations(file)] == []


def test_a_violation_would_be_found(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    (tmp_path / "diffusion").mkdir()
    file = tmp_path / "diffusion" / "kernels.py"
    file.write_text("def f():\n    from megatron_leangrpo import platform\n")
    assert violations(file) == ["diffusion.kernels imports megatron_leangrpo.platform"]


@pytest.mark.parametrize(
    ("folder", "allowed"), [("diffusion", {"torch", "numpy"}), ("grpo/schedules", {"torch"})]
)
def test_the_mathematics_needs_nothing_but_torch(folder, allowed):
    third_party = {
        imported.split(".")[0]
        for file in (PACKAGE / folder).rglob("*.py")
        for imported in imports(ast.parse(file.read_text(encoding="utf-8")))
    } - set(sys.stdlib_module_names)
    assert third_party <= allowed | {"megatron_leangrpo"}


@pytest.mark.parametrize("module", ["", ".cli", ".config", ".errors", ".info"])
def test_importing_what_answers_at_once_loads_nothing_heavy(module):
    program = (
        f"import sys, megatron_leangrpo{module};"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("[]\n", "")


def test_only_the_platform_adapts_torch_to_a_machine_without_cuda():
    patches = re.compile(r"setattr\(torch\.cuda|torch\.cuda\.\w+ = ")
    files = [file.name for file in sources() if patches.search(file.read_text(encoding="utf-8"))]
    assert files == ["platform.py"]
