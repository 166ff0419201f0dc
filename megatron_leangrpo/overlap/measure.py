# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The real loops on real ranks, over a link made slow and with products that only take time.

What is measured is the schedule and the cost of running it: order, posting, waiting, the noise of a
real machine. Nothing is said about how fast a device multiplies; `calibrate` does that.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_leangrpo.overlap.cost_model import Collective, Costs, Flash
from megatron_leangrpo.overlap.emulated_link import Clock, EmulatedLink, WallClock
from megatron_leangrpo.overlap.engine import (
    Exchange,
    Reduction,
    products_reduce_scatter,
)
from megatron_leangrpo.overlap.schedule import all_to_all_steps
from megatron_leangrpo.overlap.simulator import Span, end_of
from megatron_leangrpo.overlap.trace import Trace
from megatron_leangrpo.overlap.transport import Pending, TorchTransport
from megatron_leangrpo.overlap.ulysses import attend_in_groups

_FEATURES = 4


@dataclass(frozen=True)
class Setting:
    """What is played: `costs` in seconds, the cuts of plain slicing and those of flash."""

    costs: Costs
    chunks: int
    sub_slices: int
    """Of a slice, or groups of heads."""
    repeats: int
    collective: Collective = "reduce-scatter"

    @property
    def rows(self) -> int:
        """Rows of a slice: what chunks and sub-slices divide."""
        return self.chunks * self.sub_slices


class _Player:
    """One rank, and what it did when."""

    def __init__(self, setting: Setting, transport: TorchTransport, clock: Clock) -> None:
        self.setting, self.rank, self.size = setting, transport.rank, transport.size
        self.clock, self.started = clock, clock.now()
        self.spans: list[Span] = []
        # What goes to one rank: a slice, or three tensors and back one, of every group of heads.
        rows = 4 * setting.sub_slices if setting.collective == "all-to-all" else setting.rows
        bandwidth = rows * _FEATURES * 4 / setting.costs.hop
        self.link = EmulatedLink(
            transport, bandwidth, setting.costs.latency, clock, sent=self._sent
        )
        self.trace = Trace()

    def _sent(self, slice_: int, leaves: float, arrives: float) -> None:
        if self.trace.events:
            # A message of a group of heads, which the exchange has just recorded.
            slice_ = self.trace.events[-1].part
        span = Span(self.rank, "send", slice_, leaves - self.started, arrives - self.started)
        self.spans.append(span)

    def compute(self, slice_: int, share: float) -> None:
        """Be busy with a share of a slice's product."""
        start = self.clock.now()
        self.clock.spend(self.setting.costs.compute * share)
        span = Span(
            self.rank, "compute", slice_, start - self.started, self.clock.now() - self.started
        )
        self.spans.append(span)

    def chunks(self, count: int) -> None:
        """`count` products, each followed by all messages of its collective; then the waits."""
        pending: list[Pending] = []
        rows = self.setting.rows // count
        for chunk in range(count):
            self.compute(chunk, self.size / count)
            for step in all_to_all_steps(self.rank, self.size):
                if step.message is not None:
                    send = torch.zeros(rows, _FEATURES)
                    receive = torch.empty_like(send)
                    pending.append(self.link.exchange(send, receive, step.message, "chunk"))
        for message in pending:
            message.wait()

    def flash(self, flash: Flash) -> None:
        """The reduce-scatter of the engine."""
        rows = self.setting.rows

        def produce(start: int, stop: int, total: torch.Tensor | None) -> torch.Tensor:
            self.compute(start // rows, (stop - start) / rows)
            return torch.zeros(stop - start, _FEATURES) if total is None else total

        reduction = Reduction(rows * self.size, rows, _FEATURES, torch.float32, torch.device("cpu"))
        products_reduce_scatter(reduction, produce, Exchange(self.link, flash, "flash"))

    def attention(self, groups: int) -> None:
        """The pipeline of the engine around an attention."""
        heads = self.setting.sub_slices // groups
        packs = [torch.zeros(self.size, 1, 1, heads, 3, _FEATURES) for _ in range(groups)]
        attended = iter(range(groups))

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            self.compute(next(attended), self.size / groups)
            return v.flatten(2)

        there, back = (Exchange(self.link, Flash(), way, self.trace) for way in ("there", "back"))
        attend_in_groups(attend, packs, there, back)


def modes(setting: Setting) -> dict[str, Callable[[_Player], None]]:
    """What is compared, by the name it is printed under."""
    if setting.collective == "all-to-all":
        return {
            "none": lambda player: player.attention(1),
            f"flash ({setting.sub_slices} groups)": lambda player: player.attention(
                setting.sub_slices
            ),
        }
    cut = Flash(sub_slices=setting.sub_slices, in_product=True)
    compared: dict[str, Callable[[_Player], None]] = {
        "none": lambda player: player.chunks(1),
        f"slicing ({setting.chunks})": lambda player: player.chunks(setting.chunks),
        "flash (ring, 1)": lambda player: player.flash(Flash()),
    }
    if setting.sub_slices > 1:
        compared[f"flash (ring, {setting.sub_slices})"] = lambda player: player.flash(cut)
    return compared


def play(
    setting: Setting, transport: TorchTransport, new_clock: Callable[[], Clock]
) -> dict[str, list[Span]]:
    """Each mode's spans on this rank in the repeat in which the slowest rank was fastest."""
    best: dict[str, list[Span]] = {}
    shortest: dict[str, float] = {}
    for _ in range(setting.repeats):
        for name, run in modes(setting).items():
            dist.barrier()
            player = _Player(setting, transport, new_clock())
            run(player)
            time = player.clock.now() - player.started
            player.spans.append(Span(player.rank, "add", player.rank, time, time))
            longest = torch.tensor(time, dtype=torch.float64)
            dist.all_reduce(longest, op=dist.ReduceOp.MAX)
            if longest.item() < shortest.get(name, float("inf")):
                shortest[name], best[name] = longest.item(), player.spans
    return best


def measure_here(setting: Setting) -> dict[str, list[Span]]:
    """What a rank of `leangrpo overlap measure` runs."""
    assert dist.group.WORLD is not None
    return play(setting, TorchTransport(dist.group.WORLD, "measure", 60), WallClock)


def joined(of_ranks: list[dict[str, list[Span]]]) -> dict[str, list[Span]]:
    """All ranks' spans of each mode."""
    return {name: [span for rank in of_ranks for span in rank[name]] for name in of_ranks[0]}


def exposed_seconds(spans: list[Span], costs: Costs) -> float:
    """The time that a mode took beyond its products."""
    return end_of(spans) - costs.compute_total
