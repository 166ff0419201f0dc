# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Writing files so that a good one is never replaced by half of another, and naming them safely."""

import os
import re
import shutil
import unicodedata
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path in the same folder that becomes `path` when the block succeeds.

    The suffix is kept, because image writers choose the format by it.
    """
    path = Path(path)
    temporary = path.with_name(f".{uuid.uuid4().hex}{path.suffix}")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def atomic_write(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a whole file; readers see the old content or the new, also after a power cut."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def sync(path: Path) -> None:
    """Make the content of a file, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def slug(text: str, length: int = 40) -> str:
    """Reduce free text to lower-case ASCII letters, digits and dashes for use in a file name.

    Different texts may give the same slug, or an empty one: put a number in front of it.
    """
    ascii_text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[^a-z0-9]+", "-", ascii_text.lower())[:length].strip("-")


@contextmanager
def replaced_folder(path: Path, replaceable: re.Pattern[str], setting: str) -> Iterator[Path]:
    """Yield an empty folder beside `path` that takes its place when the block succeeds.

    What is there already must be a folder of files whose names match `replaceable`; ``ValueError``
    otherwise, before anything is written. If the block fails, what was there stays as it was; if
    the process is killed, at the latest the next call restores it and clears up.
    """
    temporary, replaced = (path.with_name(f".{path.name}.{end}") for end in ("tmp", "old"))
    if replaced.exists() and not path.exists():
        replaced.rename(path)
    check_replaceable(path, replaceable, setting)
    for left_over in (temporary, replaced):
        shutil.rmtree(left_over, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise ValueError(f"{setting} = {path} cannot be written: {error.strerror}") from error
    try:
        yield temporary
        for file in temporary.iterdir():
            sync(file)
        sync(temporary)
        if path.exists():
            path.rename(replaced)
        temporary.rename(path)
        sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if replaced.exists() and not path.exists():
            replaced.rename(path)
        shutil.rmtree(replaced, ignore_errors=True)


def check_replaceable(path: Path, replaceable: re.Pattern[str], setting: str) -> None:
    """Raise ``ValueError`` where a folder holds what is not ours to replace."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise ValueError(f"{setting} = {path} is no folder; give the path of one")
    foreign = sorted(p.name for p in path.glob("*") if not replaceable.fullmatch(p.name))
    if foreign:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise ValueError(
            f"{setting} = {path} holds {foreign[0]}{more}, which would be lost; give an empty or "
            "new folder"
        )
