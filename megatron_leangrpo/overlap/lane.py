# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The stream on which messages and additions run beside the products."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_streams: dict[torch.device, torch.cuda.Stream] = {}


class Lane:
    """On CUDA a stream beside the current one; on the host the program itself, in its order."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            if device not in _streams:
                # A message that is late delays every rank behind it; a product can wait for it.
                _streams[device] = torch.cuda.Stream(device, priority=-1)
            self._stream = _streams[device]
            self._stream.wait_stream(torch.cuda.current_stream())

    def mark(self) -> torch.cuda.Event | None:
        """The point that the products have reached."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    @contextmanager
    def beside(
        self, mark: torch.cuda.Event | None = None, uses: torch.Tensor | None = None
    ) -> Iterator[None]:
        """Run the block on the lane, after `mark`, with `uses` made by the products."""
        if self._stream is None:
            yield
            return
        if mark is not None:
            self._stream.wait_event(mark)
        if uses is not None:
            uses.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let what follows on the current stream come after the lane."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
