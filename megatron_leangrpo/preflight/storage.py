# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Whether every node can write where the run will, sees what the others write, and has room."""

import contextlib
import os
import shutil
import socket
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from megatron_leangrpo.preflight.meeting import texts_of_all
from megatron_leangrpo.preflight.result import Check
from megatron_leangrpo.reporting.sentences import byte_size

# A network file system may show a new file to another node after some seconds.
_SECONDS_TO_APPEAR = 10.0


def existing_folder(output: str | None) -> Path:
    """The folder that is there and in which the run directory is or will be made."""
    path = Path("runs" if output is None else output).absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def check_output(output: str | None, speaks: bool, hosts: Sequence[str]) -> Check:
    """Write and read one file a node in the place of the run directory (a collective).

    `speaks` is true on one rank of each node.
    """
    folder, name = existing_folder(output), "output"
    token = texts_of_all(uuid.uuid4().hex)[0]
    own, problem = folder / f".leangrpo-preflight-{token}-{dist.get_rank()}", ""
    if speaks:
        try:
            own.write_text(token)
        except OSError as error:
            problem = f"output: {socket.gethostname()} cannot write into {folder}: {error.strerror}"
    written = [answer == "yes" for answer in texts_of_all("yes" if speaks and own.exists() else "")]
    unseen = []
    if speaks and not problem:
        ranks = [rank for rank, has in enumerate(written) if has]
        unseen = [r for r in ranks if not _appears(own.with_name(f"{_stem(own)}-{r}"), token)]
    if unseen and not problem:
        others = ", ".join(dict.fromkeys(hosts[rank] for rank in unseen))
        problem = (
            f"output: {folder} on {socket.gethostname()} does not show the files of {others}; "
            "give a directory on a file system that all nodes share"
        )
    problems = [text for text in texts_of_all(problem) if text]
    if speaks:
        with contextlib.suppress(OSError):
            own.unlink(missing_ok=True)
    if problems:
        return Check(name, False, problems[0])
    shared = f", shared by {len(set(hosts))} nodes" if len(set(hosts)) > 1 else ""
    return Check(name, True, f"{folder} is writable{shared}")


def _stem(own: Path) -> str:
    return own.name.rpartition("-")[0]


def _appears(path: Path, token: str) -> bool:
    deadline = time.monotonic() + _SECONDS_TO_APPEAR
    while True:
        with contextlib.suppress(OSError):
            if path.read_text() == token:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


def space_check(output: str | None, checkpoint_bytes: int, checkpoints: int) -> Check:
    """Whether the checkpoints that stay, and the one being written, have room.

    A run that is continued has some of them already.
    """
    folder = existing_folder(output)
    held = 0 if output is None else len(list(Path(output).glob("checkpoints/step_*")))
    more = max(1, checkpoints - held)
    free = shutil.disk_usage(folder).free
    needed = checkpoint_bytes * more
    text = (
        f"{byte_size(free)} free in {folder}, {byte_size(needed)} for {more} "
        f"{'more ' if held else ''}checkpoint{'s' if more != 1 else ''} of "
        f"{byte_size(checkpoint_bytes)}"
    )
    if free >= needed and os.statvfs(folder).f_favail != 0:
        return Check("disk", True, text)
    return Check(
        "disk", False, f"{text}; free some, lower checkpoint.keep, or set another --output"
    )
