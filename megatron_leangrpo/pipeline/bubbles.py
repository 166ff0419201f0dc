# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""How long a pipeline takes and how much of it waits: closed forms.

Letters: P stages, M trajectories in flight, N steps, T of them trained (the first ones), f, b and
c = f + b the times of a stage's forward, backward and both, l the latency of a message, R a round
trip of the ring. Each time is the longest of a few paths through the order of `order`; with equal
stages, and for the rollout and the backward stream always, it is what `simulator` plays. Where the
closed forms may be off by more than two points, `waiting` plays the order instead.
"""

from collections.abc import Sequence
from functools import lru_cache

from megatron_leangrpo.pipeline.order import Schedule, Window, phases
from megatron_leangrpo.pipeline.simulator import simulate_all
from megatron_leangrpo.pipeline.times import StageTimes


def waiting(
    schedule: Schedule,
    times: StageTimes,
    trajectories: int,
    steps: int,
    windows: Sequence[Window],
) -> float:
    """Share of the stages' time in which they wait, where all trajectories train these windows."""
    return _waiting(schedule, times, trajectories, steps, tuple(windows))


@lru_cache(maxsize=4096)
def _waiting(
    schedule: Schedule,
    times: StageTimes,
    trajectories: int,
    steps: int,
    windows: tuple[Window, ...],
) -> float:
    if _has_closed_form(schedule, times.stages, trajectories, windows):
        return bubble(schedule, times, trajectories, steps, len(windows))
    order = phases(schedule, times.stages, steps, [windows] * trajectories)
    return simulate_all(order, times)[1]


def _has_closed_form(
    schedule: Schedule, stages: int, trajectories: int, windows: tuple[Window, ...]
) -> bool:
    """Whether `bubble` is the simulated one to two points."""
    if any(len(window) > 1 for window in windows):
        return False
    if schedule != "reweight":
        return True
    first_steps = tuple((step,) for step in range(len(windows)))
    return trajectories >= stages and windows == first_steps


def bubble(
    schedule: Schedule, times: StageTimes, trajectories: int, steps: int, trained: int
) -> float:
    """Share of the stages' time in which they wait, in closed form."""
    total = times.stages * sum(phase_times(schedule, times, trajectories, steps, trained))
    forwards = trajectories * (steps + (trained if schedule == "replay" else 0))
    backwards = trajectories * (0 if schedule == "rollout" else trained)
    busy = forwards * sum(times.forward) + backwards * sum(times.backward)
    return 1 - busy / total


def phase_times(
    schedule: Schedule, times: StageTimes, trajectories: int, steps: int, trained: int
) -> tuple[float, ...]:
    """Times of the phases of `order.phases`."""
    items = trajectories * trained
    if schedule == "reweight" and items:
        return (_interleaved(times, trajectories, steps, trained, times.round_trip),)
    rollout = _rollout(times, trajectories, steps)
    if schedule == "rollout" or not items:
        return (rollout,)
    if schedule == "retain":
        return rollout, _stream(times.backward, times.latency, items)
    return rollout, _interleaved(times, items, 1, 1, 0.0)


def stepwise_rollout(times: StageTimes, trajectories: int, steps: int) -> float:
    """Time of a rollout that fills and empties the pipeline at every step, as others do."""
    return steps * _stream(times.forward, times.latency, trajectories)


def waiting_in_rings(
    schedule: Schedule,
    times: StageTimes,
    trajectories: int,
    in_flight: int,
    steps: int,
    windows: Sequence[Window],
) -> float:
    """`waiting` where `in_flight` of all trajectories go around together; the last ones may be
    fewer.
    """
    full, rest = divmod(trajectories, in_flight)
    taken = sum(
        count * size / (1 - waiting(schedule, times, size, steps, windows))
        for size, count in ((in_flight, full), (rest, 1))
        if size and count
    )
    return 1 - trajectories / taken


def few_trajectories(
    schedule: Schedule, stages: int, trajectories: int, in_flight: int, steps: int
) -> str | None:
    """What it costs that too few of all trajectories are in flight, be it only the last ones, in a
    sentence; None where there are enough, or it is less than a point.
    """
    last = trajectories % in_flight
    if in_flight >= stages and not 0 < last < stages:
        return None
    times, windows = StageTimes.even(stages), [(step,) for step in range(max(1, steps - 1))]
    now = waiting_in_rings(schedule, times, trajectories, in_flight, steps, windows)
    enough = waiting(schedule, times, stages, steps, windows)
    if in_flight < stages:
        one, subject = in_flight == 1, f"{in_flight} trajector{'y' if in_flight == 1 else 'ies'}"
    elif now - enough >= 0.01:
        few = "" if last == 1 else f" {last}"
        one, subject = last == 1, f"the last{few} of {trajectories} trajectories"
    else:
        return None
    return (
        f"{subject} {'is' if one else 'are'} in flight on {stages} pipeline stages, which wait for "
        f"{now:.0%} of the time; with {stages} in flight it would be {enough:.0%}"
    )


def _stream(own: tuple[float, ...], latency: float, items: int) -> float:
    """Items one way through all stages: the first one's way, then the slowest stage's pace."""
    return sum(own) + (len(own) - 1) * latency + (items - 1) * max(own)


def _rollout(times: StageTimes, trajectories: int, steps: int) -> float:
    """A step begins when the slowest stage is through with the last one, or it has come around."""
    pace = max(trajectories * max(times.forward), times.round_trip)
    return _stream(times.forward, times.latency, trajectories) + (steps - 1) * pace


def _interleaved(times: StageTimes, m: int, steps: int, trained: int, ring: float) -> float:
    """One forward, one backward; `ring` is the time that a step takes at least."""
    paths = _Paths(times, m, steps, trained, ring)
    longest = 0.0
    for s in range(times.stages):
        drained = paths.drained(s)
        ends = [paths.after_the_forwards(s), paths.up_at_the_end(s)]
        ends += [drained + paths.down_and_up_at_the_end(s, lower) for lower in range(s)]
        longest = max(longest, *ends, drained + paths.down_at_the_end(s))
    return longest


class _Paths:
    """Lengths of paths that go at the pace of one stage most of the time.

    Stage s runs its first forwards alone (it is P - 1 - s stages from the end), then forwards and
    backwards in pairs, and what is left. Up to its last step a ring is no faster than `ring`. While
    forwards are alone, a path may go up with the first one and come down with its backward instead;
    likewise at the end.
    """

    def __init__(self, times: StageTimes, m: int, steps: int, trained: int, ring: float) -> None:
        self.f, self.b, self.c, self.l = times.forward, times.backward, times.both, times.latency
        self.times, self.m, self.steps, self.ring = times, m, steps, ring
        self.last, self.items, self.all_items = times.stages - 1, m * trained, m * steps

    def after_the_forwards(self, s: int) -> float:
        """The ring as if nothing were trained, then down from s with the last backward."""
        steps, rest = divmod(min(self.items + self.last - s, self.all_items) - 1, self.m)
        slowest = max(self.f)
        forwards = steps * max(self.m * slowest, self.ring) + rest * slowest
        down = forwards + sum(self.c[: s + 1]) + 2 * s * self.l
        return max(down, _rollout(self.times, self.m, self.steps)) if self.ring else down

    def down_at_the_end(self, s: int) -> float:
        """From s down to the first stage with the last backward."""
        return sum(self.b[:s]) + s * self.l

    def up_at_the_end(self, s: int) -> float:
        """From s up to the last stage with the last forward of the steps that are not trained."""
        left = self._left(s)
        return self._begun(s, self.last) + self._tail(s, left) + self._upwards(s) if left else 0.0

    def down_and_up_at_the_end(self, s: int, lower: int) -> float:
        """From s down to a lower stage, and up with the forwards that are left there."""
        left = self._left(lower)
        down = sum(self.b[lower:s]) + (s - lower) * self.l
        return down + self._tail(lower, left) + self._upwards(lower) if left else 0.0

    def _alone(self, s: int) -> int:
        """Forwards before the first backward, but for the one it follows."""
        return min(self.last - s, self.all_items - 1)

    def _pairs(self, s: int) -> int:
        return min(self.items, self.all_items - self._alone(s))

    def _left(self, s: int) -> int:
        """Forwards after the last backward."""
        return self.all_items - self._alone(s) - self._pairs(s)

    def _begun(self, s: int, highest: int) -> float:
        """To s, up to `highest` and back while forwards are alone, and to the end of the pairs."""
        up = max(
            self._there_and_back(s, e) + self._paced(self.f[e], 0, self._alone(e))
            for e in range(s, highest + 1)
        )
        # Latency: an excursion to stage e takes two messages for each stage, and e - s + 1 items.
        pace = max(
            (self.c[s] + self._there_and_back(s, e)) / (e - s + 1) for e in range(s, self.last + 1)
        )
        to = sum(self.f[:s]) + s * self.l
        return to + up + self._paced(pace, self._alone(s), self._pairs(s))

    def drained(self, s: int) -> float:
        """To s, and there to its last backward, by way of a higher stage if that is longer."""

        def drain(e: int) -> float:
            return self._there_and_back(s, e) + (self.items - self._pairs(e)) * self.b[e]

        highest = [e for e in range(s, self.last + 1) if e == s or not self._left(e)]
        longest = max(drain(e) for e in highest)
        if self._pairs(s) > 1:
            return self._begun(s, self.last) + longest
        # Going up at both ends takes two items.
        return max(self._begun(s, self.last) + drain(s), self._begun(s, s) + longest)

    def _tail(self, s: int, left: int) -> float:
        return self._paced(max(self.f[s:]), self.all_items - left, left)

    def _upwards(self, s: int) -> float:
        return sum(self.f[s + 1 :]) + (self.last - s) * self.l

    def _there_and_back(self, s: int, e: int) -> float:
        return sum(self.c[s + 1 : e + 1]) + 2 * (e - s) * self.l

    def _paced(self, pace: float, first: int, count: int) -> float:
        """`count` items from `first` on, which wait for the ring but in the last step."""
        waiting = min(max(self.all_items - self.m - first, 0), count)
        return waiting * max(pace, self.ring / self.m) + (count - waiting) * pace
