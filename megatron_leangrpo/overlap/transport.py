# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Sends a slice to one rank while one arrives from another: over torch's NCCL or gloo.

A transport is all that the engine knows of the network. A backend that writes into symmetric memory
of its peers (copy engines on NVLink) is another class with the same three members.
"""

import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_leangrpo import platform
from megatron_leangrpo.overlap.schedule import Message

_MOST_DIMENSIONS = 6


class TransportError(RuntimeError):
    """A peer did not answer, or the ranks disagree; the message names rank and layer."""


class Pending(Protocol):
    """A message on its way."""

    def wait(self) -> None:
        """Return when both halves are done; on CUDA the current stream waits instead."""


class Transport(Protocol):
    """Point-to-point messages in one group."""

    rank: int
    size: int

    def exchange(
        self, send: torch.Tensor, receive: torch.Tensor, message: Message, layer: str
    ) -> Pending:
        """Start both halves of a message; every rank calls it in the same order."""

    def check_agreement(self, layer: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Raise `TransportError` on every rank unless all are at this layer with this shape."""


class Alone:
    """The transport of a group of one."""

    rank, size = 0, 1

    def exchange(
        self, send: torch.Tensor, receive: torch.Tensor, message: Message, layer: str
    ) -> Pending:
        """Never called: one rank has nobody to talk to."""
        raise AssertionError("a group of one rank sends nothing")

    def check_agreement(self, layer: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """One rank agrees with itself."""


class TorchTransport:
    """Batched isend and irecv on a communicator of its own.

    Each direction of traffic has its own communicator, so that a ring of an all-gather and a ring
    of a reduce-scatter do not queue behind each other. gloo raises when a peer is gone or silent
    for `timeout_seconds`; with NCCL torch's watchdog ends the process after that time.
    """

    def __init__(
        self, group: dist.ProcessGroup, purpose: str, timeout_seconds: float = 600
    ) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._parent = group
        self._group = platform.companion_group(group, purpose, timeout_seconds)
        self._timeout = timedelta(seconds=timeout_seconds)
        self._agreed: set[tuple[object, ...]] = set()
        self._warm_up()

    def _warm_up(self) -> None:
        """Connect all neighbours in one batch that every rank takes part in, as NCCL asks."""
        there, here = torch.zeros(2, 1, device=platform.device())
        following, preceding = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        message = Message(following, self.rank, preceding, preceding)
        self.exchange(there, here, message, "warm-up").wait()

    def exchange(
        self, send: torch.Tensor, receive: torch.Tensor, message: Message, layer: str
    ) -> Pending:
        """Post the send and the receive as one batch."""
        # NCCL ignores tags; with gloo what does not belong together never meets.
        operations = [
            dist.P2POp(op, tensor, group=self._group, tag=_tag(tensor, layer), group_peer=peer)
            for op, tensor, peer in (
                (dist.isend, send, message.to),
                (dist.irecv, receive, message.source),
            )
        ]
        where = f"rank {self.rank} of {self.size}, layer {layer}, slice {message.receives}"
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise TransportError(f"{where}: cannot reach its peers: {error}") from error
        return _TorchPending(works, operations, where, message, self._timeout)

    def check_agreement(self, layer: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Compare what the ranks are about to exchange, once for every layer and shape."""
        key = (layer, *shape, dtype)
        if key in self._agreed:
            return
        padded = [*shape, *[-1] * (_MOST_DIMENSIONS - len(shape))]
        mine = torch.tensor([_checksum(f"{layer} {dtype}"), *padded], device=platform.device())
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            work = dist.all_gather(everyone, mine, group=self._parent, async_op=True)
            work.wait(self._timeout)
        except RuntimeError as error:
            raise TransportError(
                f"rank {self.rank} of {self.size}, layer {layer}: a peer did not come to this "
                f"layer within {self._timeout.total_seconds():g} s: {error}"
            ) from error
        seen = [values.tolist() for values in everyone]
        different = [rank for rank in range(self.size) if seen[rank] != seen[self.rank]]
        if different:
            other = different[0]
            theirs = f"shape {tuple(size for size in seen[other][1:] if size >= 0)}"
            if seen[other][0] != seen[self.rank][0]:
                theirs += " of another layer or dtype"
            raise TransportError(
                f"rank {self.rank} of {self.size}, layer {layer}: this rank has shape "
                f"{tuple(shape)} in {dtype}, rank {other} has {theirs}"
            )
        self._agreed.add(key)


_transports: dict[tuple[dist.ProcessGroup, str], TorchTransport] = platform.kept_with_groups({})


def transport_of(group: dist.ProcessGroup | None, purpose: str) -> Transport:
    """The transport of a group for one direction of traffic.

    The first call makes its communicator: every process of the world must come to it.
    """
    if platform.group_size(group) == 1:
        return Alone()
    assert group is not None
    if (group, purpose) not in _transports:
        _transports[group, purpose] = TorchTransport(group, purpose, platform.timeout_seconds())
    return _transports[group, purpose]


class _TorchPending:
    def __init__(
        self,
        works: list[dist.Work],
        operations: list[dist.P2POp],
        where: str,
        message: Message,
        timeout: timedelta,
    ) -> None:
        # The operations keep both tensors alive until the wait.
        self._works, self._operations = works, operations
        self._where, self._message, self._timeout = where, message, timeout

    def wait(self) -> None:
        try:
            for work in self._works:
                if platform.is_host():
                    work.wait(self._timeout)
                else:
                    work.wait()
        except RuntimeError as error:
            raise TransportError(
                f"{self._where}: nothing from rank {self._message.source} or nothing taken by rank "
                f"{self._message.to} within {self._timeout.total_seconds():g} s: {error}"
            ) from error


def _checksum(text: str) -> int:
    return zlib.crc32(text.encode()) & 0x7FFFFFFF


def _tag(tensor: torch.Tensor, layer: str) -> int:
    return _checksum(f"{layer} {tensor.numel()} {tensor.dtype}")
