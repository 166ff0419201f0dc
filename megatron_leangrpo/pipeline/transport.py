# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Messages between neighbouring stages: a tuple of tensors as one buffer of bytes.

Forwards, backwards and the latents that the last stage hands to the first travel in groups of their
own, so that none queues behind another. Receives are posted before they are needed and a stage has
one send a direction on its way: it waits for the last one before the next.
"""

import contextlib
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from megatron_leangrpo import platform
from megatron_leangrpo.overlap.transport import TransportError
from megatron_leangrpo.pipeline.order import Item

Direction = Literal["forward", "backward", "latents"]

# Every dtype may be viewed at a multiple of this.
_ALIGNMENT = 16


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool = field(default=True, compare=False)
    """Whether a gradient comes back for it."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its numbers."""
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorSpec":
        """What a tensor needs."""
        return cls(tuple(tensor.shape), tensor.dtype)


Boundary = tuple[TensorSpec, ...]
"""What passes between two stages; its gradients have the same shapes and dtypes."""


def differentiable(boundary: Boundary) -> Boundary:
    """What comes back through a boundary in a backward."""
    return tuple(spec for spec in boundary if spec.differentiable)


def empty_message(boundary: Boundary, device: torch.device) -> torch.Tensor:
    """A buffer for one message."""
    size = sum(_aligned(spec.num_bytes) for spec in boundary)
    return torch.empty(size, dtype=torch.uint8, device=device)


def unpack(buffer: torch.Tensor, boundary: Boundary) -> tuple[torch.Tensor, ...]:
    """The tensors of a message, in its memory."""
    tensors, start = [], 0
    for spec in boundary:
        part = buffer[start : start + spec.num_bytes]
        tensors.append(part.view(spec.dtype).view(spec.shape))
        start += _aligned(spec.num_bytes)
    return tuple(tensors)


def pack(tensors: Sequence[torch.Tensor], boundary: Boundary) -> torch.Tensor:
    """Copy tensors into one buffer, without autograd."""
    own = tuple(TensorSpec.of(tensor) for tensor in tensors)
    assert own == boundary, f"a stage returned {own}, its boundary is {boundary}"
    buffer = empty_message(boundary, tensors[0].device)
    for place, tensor in zip(unpack(buffer, boundary), tensors):
        place.copy_(tensor.detach())
    return buffer


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class Alone:
    """The transport of a pipeline of one stage: latents come back at once."""

    stage, stages = 0, 1

    def __init__(self) -> None:
        self._latents: dict[Item, tuple[torch.Tensor, ...]] = {}

    def expect(self, direction: Direction, boundary: Boundary, item: Item) -> None:
        """Nothing is on its way."""

    def receive(self, direction: Direction, item: Item) -> tuple[torch.Tensor, ...]:
        """What was sent before."""
        return self._latents.pop(item)

    def send(
        self, direction: Direction, tensors: Sequence[torch.Tensor], boundary: Boundary, item: Item
    ) -> None:
        """Keep it."""
        assert direction == "latents", "one stage has no neighbours"
        self._latents[item] = tuple(tensor.detach() for tensor in tensors)

    def finish(self) -> None:
        """Nothing to wait for."""


@dataclass
class _Message:
    """A message on its way; keeps its buffer alive."""

    work: dist.Work
    buffer: torch.Tensor
    boundary: Boundary
    direction: Direction
    item: Item


@dataclass
class _Channel:
    group: dist.ProcessGroup
    incoming: dict[Item, _Message] = field(default_factory=dict)
    outgoing: _Message | None = None


class StageTransport:
    """Point-to-point messages of one stage in a pipeline group, whose ranks are the stages.

    gloo raises where a peer is gone or silent for `timeout_seconds`; with NCCL torch's watchdog
    ends the process after that time. Every process of the world must make its transport at once.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_seconds: float) -> None:
        self.stage, self.stages = group.rank(), group.size()
        self._timeout = timedelta(seconds=timeout_seconds)
        self._channels = {
            direction: _Channel(
                platform.companion_group(group, f"pipeline {direction}", timeout_seconds)
            )
            for direction in ("forward", "backward", "latents")
        }
        if self.stages > 1:
            self._warm_up()

    def _warm_up(self) -> None:
        """Connect all pairs in one order: NCCL makes a pair's communicator at its first message."""
        token, start = (TensorSpec((1,), torch.float32),), Item(-1, -1)
        message = torch.zeros(1, device=platform.device())
        for direction in self._channels:
            source, target = self._source(direction), self._target(direction)
            # Each pair after the one before it, from the stage that only sends.
            if source is not None:
                self.expect(direction, token, start)
                self.receive(direction, start)
            if target is not None:
                self.send(direction, (message,), token, start)
        self.finish()

    def _source(self, direction: Direction) -> int | None:
        if direction == "latents":
            return self.stages - 1 if self.stage == 0 else None
        return self._neighbour(-1 if direction == "forward" else 1)

    def _target(self, direction: Direction) -> int | None:
        if direction == "latents":
            return 0 if self.stage == self.stages - 1 else None
        return self._neighbour(1 if direction == "forward" else -1)

    def _neighbour(self, offset: int) -> int | None:
        return self.stage + offset if 0 <= self.stage + offset < self.stages else None

    def expect(self, direction: Direction, boundary: Boundary, item: Item) -> None:
        """Post the receive of a message."""
        channel, source = self._channels[direction], self._source(direction)
        buffer = empty_message(boundary, platform.device())
        with self._naming(direction, item, f"nothing from stage {source}"):
            work = dist.irecv(
                buffer, group=channel.group, group_src=source, tag=_tag(direction, item, buffer)
            )
        channel.incoming[item] = _Message(work, buffer, boundary, direction, item)

    def receive(self, direction: Direction, item: Item) -> tuple[torch.Tensor, ...]:
        """The tensors of an expected message, when it is there."""
        message = self._channels[direction].incoming.pop(item)
        with self._naming(direction, item, f"nothing from stage {self._source(direction)}"):
            self._wait(message)
        return unpack(message.buffer, message.boundary)

    def send(
        self, direction: Direction, tensors: Sequence[torch.Tensor], boundary: Boundary, item: Item
    ) -> None:
        """Send a message as soon as the last one in this direction has been taken."""
        channel, target = self._channels[direction], self._target(direction)
        self._finish(channel)
        buffer = pack(tensors, boundary)
        with self._naming(direction, item, f"cannot reach stage {target}"):
            work = dist.isend(
                buffer, group=channel.group, group_dst=target, tag=_tag(direction, item, buffer)
            )
        channel.outgoing = _Message(work, buffer, boundary, direction, item)

    def finish(self) -> None:
        """Wait until everything that was sent has been taken."""
        for channel in self._channels.values():
            self._finish(channel)

    def _finish(self, channel: _Channel) -> None:
        message, channel.outgoing = channel.outgoing, None
        if message is not None:
            target = self._target(message.direction)
            with self._naming(message.direction, message.item, f"not taken by stage {target}"):
                self._wait(message)

    def _wait(self, message: _Message) -> None:
        if platform.is_host():
            message.work.wait(self._timeout)
        else:
            message.work.wait()

    @contextlib.contextmanager
    def _naming(self, direction: Direction, item: Item, problem: str) -> Iterator[None]:
        """Say which message an error of torch is about."""
        try:
            yield
        except RuntimeError as error:
            raise TransportError(
                f"pipeline stage {self.stage} of {self.stages}, {direction} of {item}: {problem} "
                f"within {self._timeout.total_seconds():g} s: {error}"
            ) from error


def _tag(direction: Direction, item: Item, buffer: torch.Tensor) -> int:
    """With gloo what does not belong together never meets; NCCL goes by the order."""
    return zlib.crc32(f"{direction} {item} {buffer.numel()}".encode()) & 0x7FFFFFFF
