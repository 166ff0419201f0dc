# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Which steps of a trajectory are stochastic and which are trained, fixed before the rollout.

A plan depends only on (seed, iteration, prompt, sample), so every rank and every resumed run gets
the same one. The last step is never trained: Flow-GRPO drops it for its small std, CPS has none
there, and DanceGRPO decodes a latent that its noise never reaches.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, Protocol

from megatron_leangrpo.seeding import generator

Scope = Literal["sample", "group", "iteration"]
STEP_SELECTIONS = ("first_fraction", "random_fraction", "window", "progressive")


@dataclass(frozen=True)
class StepPlan:
    """Step indices of one trajectory, ascending; `trained` is a subset of `stochastic`."""

    stochastic: tuple[int, ...]
    trained: tuple[int, ...]
    drawn_singly: bool = False
    """Trained steps were drawn one by one: those next to each other are so by chance."""


DETERMINISTIC = StepPlan((), ())
"""The plan of evaluation: every step is the ODE's."""


class StepSelector(Protocol):
    """Decides the plan of every trajectory."""

    def plan(self, seed: int, iteration: int, prompt_id: int, sample_index: int) -> StepPlan:
        """The plan of one trajectory."""

    def num_trained(self, iteration: int) -> int:
        """Trained steps of every trajectory of an iteration; largest at iteration 0."""


def _scoped_generator(
    domain: str, scope: Scope, seed: int, iteration: int, prompt_id: int, sample_index: int
):
    identity = {"sample": (prompt_id, sample_index), "group": (prompt_id,), "iteration": ()}
    return generator(f"{domain} of a {scope}", seed, iteration, *identity[scope])


def _check_scope(scope: str, valid: Sequence[str]) -> None:
    if scope not in valid:
        raise ValueError(f"sampling.selection_scope={scope!r}: must be one of {tuple(valid)}")


def _check_fraction(fraction: float, num_steps: int, trainable: int) -> None:
    if not (0 < fraction <= 1):
        raise ValueError(f"sampling.timestep_fraction={fraction}: must be in (0, 1]")
    if int(trainable * fraction) < 1:
        raise ValueError(
            f"sampling.timestep_fraction={fraction}: trains no step of "
            f"sampling.num_steps={num_steps}; raise one of them"
        )


def _check_window_size(window_size: int, trainable: int, num_steps: int) -> None:
    if not 1 <= window_size <= trainable:
        raise ValueError(
            f"sampling.window_size={window_size}: must be between 1 and {max(trainable, 0)} with "
            f"sampling.num_steps={num_steps}"
        )


@dataclass(frozen=True)
class FirstFraction:
    """Flow-GRPO: every step is stochastic, the first int(fraction * N) are trained."""

    num_steps: int
    timestep_fraction: float = 0.99

    def __post_init__(self) -> None:
        _check_fraction(self.timestep_fraction, self.num_steps, trainable=self.num_steps)
        if self.num_trained() == self.num_steps:
            raise ValueError(
                f"sampling.timestep_fraction={self.timestep_fraction}: would train the last of "
                f"sampling.num_steps={self.num_steps} steps, which has next to no noise; at most "
                f"{(self.num_steps - 0.5) / self.num_steps:.4g} here"
            )

    def num_trained(self, iteration: int = 0) -> int:
        """Trained steps of every trajectory."""
        return int(self.num_steps * self.timestep_fraction)

    def plan(self, seed: int, iteration: int, prompt_id: int, sample_index: int) -> StepPlan:
        """The same plan for all."""
        return StepPlan(tuple(range(self.num_steps)), tuple(range(self.num_trained())))


@dataclass(frozen=True)
class RandomFraction:
    """DanceGRPO: every step is stochastic, int(fraction * (N - 1)) of the first N - 1 train.

    With `block_size`, whole blocks of consecutive steps are drawn, as many as the fraction holds.
    Blocks are counted from step 0; what the last of them leaves of the N - 1 steps never trains.
    """

    num_steps: int
    timestep_fraction: float = 0.6
    block_size: int | None = None
    scope: Scope = "sample"

    def __post_init__(self) -> None:
        _check_scope(self.scope, ("sample", "group", "iteration"))
        _check_fraction(self.timestep_fraction, self.num_steps, trainable=self.num_steps - 1)
        if self.block_size is not None and not 1 <= self.block_size <= self._share:
            raise ValueError(
                f"sampling.block_size={self.block_size}: must be between 1 and {self._share}, the "
                f"steps that sampling.timestep_fraction={self.timestep_fraction} trains of "
                f"sampling.num_steps={self.num_steps}"
            )

    @property
    def _share(self) -> int:
        return int((self.num_steps - 1) * self.timestep_fraction)

    def num_trained(self, iteration: int = 0) -> int:
        """Trained steps of every trajectory."""
        block = self.block_size or 1
        return self._share // block * block

    def plan(self, seed: int, iteration: int, prompt_id: int, sample_index: int) -> StepPlan:
        """An independent subset for each member of the scope."""
        rng = _scoped_generator(
            "trained steps", self.scope, seed, iteration, prompt_id, sample_index
        )
        block = self.block_size or 1
        blocks = rng.permutation((self.num_steps - 1) // block)[: self.num_trained() // block]
        trained = [start * block + k for start in sorted(blocks.tolist()) for k in range(block)]
        every = tuple(range(self.num_steps))
        return StepPlan(every, tuple(trained), drawn_singly=self.block_size is None)


@dataclass(frozen=True)
class Window:
    """Flow-GRPO-Fast: a contiguous window is stochastic and trained, the rest is the ODE's.

    One start is drawn for a whole group or iteration: members of a group with windows of their own
    are not comparable (verl-omni reports a collapse within 28 steps).
    """

    num_steps: int
    window_size: int
    window_starts: tuple[int, ...]
    scope: Scope = "group"

    def __post_init__(self) -> None:
        _check_scope(self.scope, ("group", "iteration"))
        _check_window_size(self.window_size, self.num_steps - 1, self.num_steps)
        last = self.num_steps - 1 - self.window_size
        starts = tuple(self.window_starts)
        if not starts or any(not 0 <= start <= last for start in starts):
            raise ValueError(
                f"sampling.window_starts={list(starts)}: needs one or more starts between 0 and "
                f"{last} with sampling.num_steps={self.num_steps} and "
                f"sampling.window_size={self.window_size} (the last step is never trained)"
            )

    def num_trained(self, iteration: int = 0) -> int:
        """Trained steps of every trajectory."""
        return self.window_size

    def plan(self, seed: int, iteration: int, prompt_id: int, sample_index: int) -> StepPlan:
        """The window of the group or of the iteration."""
        rng = _scoped_generator(
            "window start", self.scope, seed, iteration, prompt_id, sample_index
        )
        start = self.window_starts[int(rng.integers(len(self.window_starts)))]
        window = tuple(range(start, start + self.window_size))
        return StepPlan(window, window)


@dataclass(frozen=True)
class ProgressiveWindow:
    """MixGRPO: one window for everybody that slides along the trajectory and then starts again.

    It stays `window_interval` iterations at a start and moves by `window_stride`. With
    `window_decay` k it stays ceil(window_interval * exp(-k * max(0, start - window_decay_start)))
    iterations (MixGRPO's exp_decay). The last two steps are never in a window, and a window that
    reaches them is cut short.

    MixGRPO rolls back only once the start exceeds N - 2, so that whenever it lands on N - 2 it
    trains nothing for a whole stay. Here the window rolls back at N - 2: no iteration is wasted.
    """

    num_steps: int
    window_size: int = 4
    window_interval: int = 25
    window_stride: int = 1
    window_decay: float | None = None
    window_decay_start: int = 0

    def __post_init__(self) -> None:
        _check_window_size(self.window_size, self.num_steps - 2, self.num_steps)
        for name in ("window_interval", "window_stride"):
            if getattr(self, name) < 1:
                raise ValueError(f"sampling.{name}={getattr(self, name)}: must be at least 1")
        if self.window_decay is not None and not 0 <= self.window_decay < math.inf:
            raise ValueError(f"sampling.window_decay={self.window_decay}: must be 0 or more")

    def iterations_at(self, start: int) -> int:
        """How many iterations the window stays at a start."""
        if self.window_decay is None:
            return self.window_interval
        excess = max(0, start - self.window_decay_start)
        return math.ceil(self.window_interval * math.exp(-self.window_decay * excess))

    def window(self, iteration: int) -> tuple[int, ...]:
        """Trained steps of an iteration, never empty."""
        end = self.num_steps - 2
        starts = range(0, end, self.window_stride)
        ends_of_stays = list(accumulate(self.iterations_at(start) for start in starts))
        start = starts[bisect_right(ends_of_stays, iteration % ends_of_stays[-1])]
        return tuple(range(start, min(start + self.window_size, end)))

    def num_trained(self, iteration: int) -> int:
        """Trained steps of every trajectory of an iteration."""
        return len(self.window(iteration))

    def plan(self, seed: int, iteration: int, prompt_id: int, sample_index: int) -> StepPlan:
        """The window of the iteration."""
        window = self.window(iteration)
        return StepPlan(window, window)


_SELECTORS = {
    "first_fraction": FirstFraction,
    "random_fraction": RandomFraction,
    "window": Window,
    "progressive": ProgressiveWindow,
}


def build_step_selector(name: str, num_steps: int, **settings) -> StepSelector:
    """Build a selector by name from the settings that are not None.

    `settings`: timestep_fraction, block_size, scope, window_size, window_starts, window_interval,
    window_stride, window_decay, window_decay_start. One the selector does not have is an error.
    """
    if name not in _SELECTORS:
        raise ValueError(f"sampling.step_selection={name!r}: must be one of {STEP_SELECTIONS}")
    if num_steps < 1:
        raise ValueError(f"sampling.num_steps={num_steps}: must be at least 1")
    selector = _SELECTORS[name]
    given = {key: value for key, value in settings.items() if value is not None}
    valid = set(selector.__dataclass_fields__) - {"num_steps"}
    for key in given:
        if key not in valid:
            setting = "selection_scope" if key == "scope" else key
            raise ValueError(
                f"sampling.{setting}={given[key]!r}: has no effect with "
                f"sampling.step_selection={name}; leave it null"
            )
    if name == "window":
        for key in ("window_size", "window_starts"):
            if key not in given:
                raise ValueError(f"sampling.{key}=None: sampling.step_selection=window needs it")
        given["window_starts"] = tuple(given["window_starts"])
    return selector(num_steps=num_steps, **given)
