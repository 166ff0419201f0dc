# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What this machine's products, additions and links really take, for the cost model."""

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_leangrpo import platform
from megatron_leangrpo.files import atomic_write
from megatron_leangrpo.overlap.rank_processes import run_on_ranks
from megatron_leangrpo.overlap.schedule import Message
from megatron_leangrpo.overlap.transport import TorchTransport

_CUTS = (1, 2, 4, 8, 16)
_REPEATS = 7


@dataclass(frozen=True)
class Calibration:
    """Measured once a machine, read by whoever chooses a mode."""

    device: str
    dtype: str
    flops_per_second: float
    """Of one whole product."""
    cut_efficiency: dict[str, float]
    """Time of the whole product over that of its parts one after another, by number of parts."""
    sum_in_product_slowdown: float
    """A part that is added to a running sum by the product itself, over the part alone."""
    add_bytes_per_second: float
    """Bytes of one operand of an addition of two tensors."""
    link_bytes_per_second: float | None
    """One direction, between two ranks of this machine; None with fewer than two devices."""
    link_latency_seconds: float | None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON."""
        atomic_write(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Calibration":
        """Read what `save` has written; ValueError names the file otherwise."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(
                f"{path} is no calibration of leangrpo overlap measure --calibrate: {error}"
            ) from None

    def to_json(self) -> str:
        """What a file of it holds."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Calibration":
        """The inverse of `to_json`; ValueError or TypeError for anything else."""
        return cls(**json.loads(text))


def calibrate() -> Calibration:
    """Measure this machine: seconds on a GPU, about a minute on a small host."""
    device = platform.device()
    on_host = platform.is_host()
    size, dtype = (768, torch.float32) if on_host else (6144, torch.bfloat16)
    x = torch.randn(size, size, device=device, dtype=dtype)
    weight = torch.randn(size, size, device=device, dtype=dtype)
    whole = _seconds(lambda: torch.mm(x, weight))
    cuts = {parts: _cut_seconds(x, weight, parts) for parts in _CUTS}
    part = x[: size // 4]
    total = torch.zeros(size // 4, size, device=device, dtype=dtype)
    alone = _seconds(lambda: torch.mm(part, weight))
    added = _seconds(lambda: total.addmm_(part, weight))
    addition = _seconds(lambda: total.add_(part))
    several = on_host or torch.cuda.device_count() > 1
    bandwidth, latency = run_on_ranks(2, link_here)[0] if several else (None, None)
    return Calibration(
        device="CPU" if on_host else torch.cuda.get_device_name(device),
        dtype=str(dtype).removeprefix("torch."),
        flops_per_second=2 * size**3 / whole,
        cut_efficiency={str(parts): whole / seconds for parts, seconds in cuts.items()},
        sum_in_product_slowdown=added / alone,
        add_bytes_per_second=total.nbytes / addition,
        link_bytes_per_second=bandwidth,
        link_latency_seconds=latency,
    )


def _cut_seconds(x: torch.Tensor, weight: torch.Tensor, parts: int) -> float:
    pieces = x.chunk(parts)
    return _seconds(lambda: [torch.mm(piece, weight) for piece in pieces])


def _seconds(work: Callable[[], object]) -> float:
    """The median of a few runs after one that is not counted."""
    times = []
    for _ in range(_REPEATS + 1):
        platform.synchronize()
        start = time.perf_counter()
        work()
        platform.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def link_here() -> tuple[float, float]:
    """Bandwidth and latency of a message between two ranks that both send; run on both."""
    assert dist.group.WORLD is not None
    transport = TorchTransport(dist.group.WORLD, "calibrate", 60)
    small, large = 1024, (4 if platform.is_host() else 256) * 2**20
    short, long = (_message_seconds(transport, size) for size in (small, large))
    bandwidth = (large - small) / max(long - short, 1e-9)
    return bandwidth, max(0.0, short - small / bandwidth)


def _message_seconds(transport: TorchTransport, size: int) -> float:
    send = torch.zeros(size, dtype=torch.uint8, device=platform.device())
    receive = torch.empty_like(send)
    other = 1 - transport.rank
    message = Message(other, transport.rank, other, other)
    dist.barrier()
    return _seconds(lambda: transport.exchange(send, receive, message, "calibrate").wait())
