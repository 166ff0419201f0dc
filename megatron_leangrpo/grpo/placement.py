# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Groups, and which data-parallel rank rolls out which of their members in which wave.

A *wave* is what one rank rolls out in one forward: ``micro_batch_size`` trajectories. All ranks run
their waves in step, so a group placed with ``spread`` completes early and its graphs can go.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_leangrpo.conditioning.prompts import Prompt


@dataclass(frozen=True)
class Group:
    """The samples of one prompt of an iteration that are compared with each other."""

    index: int
    prompt: Prompt


@dataclass(frozen=True)
class Slot:
    """One trajectory; prompt id and member are the key of its noise."""

    group: int
    member: int
    prompt_id: int


@dataclass(frozen=True)
class Wave:
    """The trajectories that one rank rolls out together; all in the same mini-batch."""

    index: int
    minibatch: int
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class Placement:
    """The waves of one rank, in order, and when each group is complete over all ranks."""

    waves: tuple[Wave, ...]
    completed_by: tuple[int, ...]
    """Index of the wave after which a group has all its members."""

    def ready(self, wave: Wave, after: int) -> bool:
        """Whether every group of `wave` is complete once wave `after` has been rewarded."""
        return max(self.completed_by[slot.group] for slot in wave.slots) <= after

    def completes(self, waves: Sequence[Wave]) -> bool:
        """Whether some group is complete with the rewards of these waves, and not before."""
        return any(wave.index in self.completed_by for wave in waves)


def check_placement(
    prompts: int, group_size: int, dp_size: int, placement: str, updates: int
) -> None:
    """Raise ``ValueError`` where groups cannot be dealt evenly over the ranks and mini-batches."""
    for name, value in (
        ("grpo.prompts_per_iteration", prompts),
        ("grpo.group_size", group_size),
        ("grpo.updates_per_rollout", updates),
    ):
        if value < 1:
            raise ValueError(f"{name} = {value} must be at least 1")
    if group_size % updates:
        valid = [u for u in range(1, group_size + 1) if group_size % u == 0]
        raise ValueError(
            f"grpo.updates_per_rollout = {updates} must divide grpo.group_size = {group_size}: "
            f"each update trains an equal share of every group; valid: {valid}"
        )
    dealt = prompts if placement == "local" else prompts * group_size // updates
    if dealt % dp_size == 0:
        return
    share = 1 if placement == "local" else group_size // updates
    near = _nearest_multiples(prompts, lambda p: p * share % dp_size == 0)
    what = "groups" if placement == "local" else "trajectories of an update"
    raise ValueError(
        f"grpo.prompts_per_iteration = {prompts} and grpo.group_size = {group_size} make {dealt} "
        f"{what}, which {dp_size} data-parallel ranks do not divide (grpo.placement = "
        f"{placement}); nearest valid grpo.prompts_per_iteration: {near}"
        + ("" if placement == "spread" else ", or grpo.placement = spread")
    )


def place(
    groups: Sequence[Group],
    group_size: int,
    *,
    dp_rank: int,
    dp_size: int,
    placement: str = "spread",
    micro_batch_size: int = 1,
    updates: int = 1,
    seed: int = 0,
    iteration: int = 0,
) -> Placement:
    """Deal the members of all groups over ranks, mini-batches and waves.

    Who is in which mini-batch depends on (seed, iteration, group) alone, never on the layout. The
    first mini-batch rolls out last: then its groups complete while its graphs are young.
    """
    return place_on_all(
        groups,
        group_size,
        dp_size=dp_size,
        placement=placement,
        micro_batch_size=micro_batch_size,
        updates=updates,
        seed=seed,
        iteration=iteration,
    )[dp_rank]


def place_on_all(
    groups: Sequence[Group],
    group_size: int,
    *,
    dp_size: int,
    placement: str = "spread",
    micro_batch_size: int = 1,
    updates: int = 1,
    seed: int = 0,
    iteration: int = 0,
) -> list[Placement]:
    """Return what `place` returns on each of the data-parallel ranks."""
    check_placement(len(groups), group_size, dp_size, placement, updates)
    completed = [0] * len(groups)
    waves: list[list[Wave]] = [[] for _ in range(dp_size)]
    index = 0
    for minibatch in reversed(range(updates)):
        dealt = _minibatch_slots(groups, group_size, minibatch, updates, seed, iteration)
        per_rank = _deal(dealt, groups, dp_size, placement)
        for start in range(0, len(per_rank[0]), micro_batch_size):
            for rank, slots in enumerate(per_rank):
                wave = Wave(index, minibatch, tuple(slots[start : start + micro_batch_size]))
                for slot in wave.slots:
                    completed[slot.group] = index
                waves[rank].append(wave)
            index += 1
    return [Placement(tuple(own), tuple(completed)) for own in waves]


def _minibatch_slots(
    groups: Sequence[Group],
    group_size: int,
    minibatch: int,
    updates: int,
    seed: int,
    iteration: int,
) -> list[Slot]:
    share = group_size // updates
    slots = []
    for group in groups:
        members = list(range(group_size))
        if updates > 1:
            random.Random(f"mini-batch {seed} {iteration} {group.prompt.id}").shuffle(members)
        for member in sorted(members[minibatch * share : (minibatch + 1) * share]):
            slots.append(Slot(group.index, member, group.prompt.id))
    return slots


def _deal(
    slots: list[Slot], groups: Sequence[Group], dp_size: int, placement: str
) -> list[list[Slot]]:
    if placement == "spread":
        return [slots[rank::dp_size] for rank in range(dp_size)]
    per_rank = len(groups) // dp_size
    return [[s for s in slots if s.group // per_rank == rank] for rank in range(dp_size)]


def _nearest_multiples(value: int, valid) -> list[int]:
    below = next((v for v in range(value, 0, -1) if valid(v)), None)
    above = next(v for v in range(value + 1, value + 10_000) if valid(v))
    return [v for v in (below, above) if v is not None]
