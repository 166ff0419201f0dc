# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Writing files so that a good one is never replaced by half of another, and naming them safely."""

import os
import re
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
        sync_file(temporary)
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def atomic_write(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a whole file; readers see the old content or the new, also after a power cut."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def sync_folder(path: Path) -> None:
    """Make the names in a folder survive a power cut."""
    sync_file(path)


def sync_file(path: Path) -> None:
    """Make the content of a file survive a power cut."""
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
