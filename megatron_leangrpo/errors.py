# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""How a command ends: one message and an exit status, whatever was raised on however many ranks."""

import argparse
import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

BAD_INPUT = 2
FAILURE = 1
INTERRUPTED = 130

TRACEBACK_VARIABLE = "LEANGRPO_TRACEBACK"

# What a rank sees when another one has gone; the cause is the other rank's to tell.
_PEER_HAS_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "DistNetworkError",
)
_SECONDS_FOR_THE_CAUSE = 2.0


def run_command(command: Callable[[], int | None]) -> int:
    """Run a command and return its exit status, after printing at most one message.

    `ValueError` is what a user can cause and gives 2, Ctrl-C gives 130, anything else 1. Under a
    launcher only the rank that failed first on a node prints. While a process group is alive a
    failing rank leaves the process at once, because tearing the group down can wait for ever on
    ranks that are inside a collective: do not destroy it in a `finally` on the way here.
    """
    try:
        return command() or 0
    except KeyboardInterrupt as interrupt:
        # The launcher passes Ctrl-C on a second time; it must not hit the message below.
        _ignore_signals()
        return _end(str(interrupt) or "interrupted", INTERRUPTED)
    except BrokenPipeError:
        # The reader (`leangrpo info | head`) wants no more; Python would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE
    except Exception as error:
        _ignore_signals(signal.SIGINT)
        status = BAD_INPUT if _is_bad_input(error) else FAILURE
        if any(sign in f"{type(error).__name__}: {error}" for sign in _PEER_HAS_GONE):
            time.sleep(_SECONDS_FOR_THE_CAUSE)
        return _end(f"error{_on_rank(status)}: {_describe(error, status)}", status, error)


def _is_bad_input(error: Exception) -> bool:
    # json and Unicode errors are ValueErrors too, so a file that does not parse counts as input.
    return isinstance(error, ValueError | argparse.ArgumentError | FileNotFoundError)


def _describe(error: Exception, status: int) -> str:
    """The message without torch's C++ stack, and with the type where that adds something."""
    text = str(error).split("Exception raised from")[0].strip()
    if status == BAD_INPUT:
        return text or type(error).__name__
    if not isinstance(error, RuntimeError | OSError) or not text:
        text = f"{type(error).__name__}: {text}".rstrip(": ")
    if not os.environ.get(TRACEBACK_VARIABLE):
        text += f" ({TRACEBACK_VARIABLE}=1 shows where)"
    return text


def _on_rank(status: int) -> str:
    if status == BAD_INPUT or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ""
    return f" on rank {os.environ.get('RANK', '0')}"


def _end(message: str, status: int, error: Exception | None = None) -> int:
    if _is_first_to_fail():
        if error is not None and os.environ.get(TRACEBACK_VARIABLE):
            traceback.print_exception(error)
        sys.stdout.flush()
        print(f"leangrpo: {message}", file=sys.stderr, flush=True)
        _tell_launcher(message)
    if _process_group_is_alive():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _is_first_to_fail() -> bool:
    """Claim the right to speak for this node; without torchrun every rank speaks for itself."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not error_file:
        return True
    # torchrun gives each attempt a folder and each local rank a folder inside it.
    claim = Path(error_file).parent.parent / "leangrpo_first_failure"
    try:
        claim.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def _tell_launcher(message: str) -> None:
    """Leave the message where torchrun looks for it, so that its own report repeats it."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not error_file:
        return
    extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError):
        Path(error_file).write_text(
            json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8"
        )


def _process_group_is_alive() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized()


def _ignore_signals(*numbers: int) -> None:
    with contextlib.suppress(ValueError):  # not in the main thread
        for number in numbers or (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
