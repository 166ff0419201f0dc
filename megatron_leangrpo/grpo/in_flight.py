# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What an iteration keeps at once on a rank: follows the waves as the runner does, without one."""

from collections import Counter

from megatron_leangrpo.conditioning.prompts import Prompt
from megatron_leangrpo.config import GrpoConfig
from megatron_leangrpo.grpo.advantages import mean_is_final_early, needs_all_groups
from megatron_leangrpo.grpo.placement import Group, Placement, Wave, place_on_all
from megatron_leangrpo.planner.workload import Batch


def batch_of(grpo: GrpoConfig, dp_size: int, rewards: int = 1, waves_in_flight: int = 1) -> Batch:
    """The iteration of the rank that keeps the most; `rewards` are terms of an advantage.

    `waves_in_flight` waves are rolled out together, those of a pipeline.
    """
    groups = [Group(n, Prompt(n, "")) for n in range(grpo.prompts_per_iteration)]
    placements = place_on_all(
        groups,
        grpo.group_size,
        dp_size=dp_size,
        placement=grpo.placement,
        micro_batch_size=grpo.micro_batch_size,
        updates=grpo.updates_per_rollout,
    )
    own = placements[0].waves
    trained = [wave for wave in own if wave.minibatch == 0]
    waits = needs_all_groups(grpo.advantage, grpo.reward_combination)
    pending = max(most_in_flight(p, waits, waves_in_flight) for p in placements)
    return Batch(
        waves=len(own),
        trained_waves=len(trained),
        wave_size=max(len(wave.slots) for wave in own),
        graphs_in_flight=pending,
        pending=len(own) - len(trained) + pending,
        moment_copies=max(moment_copies(p, grpo, rewards, waves_in_flight) for p in placements),
        waves_in_flight=min(waves_in_flight, len(own)),
    )


def most_in_flight(placement: Placement, waits_for_all: bool, waves_in_flight: int = 1) -> int:
    """Most on-policy waves that have been rolled out and not yet trained."""
    pending: list[Wave] = []
    most = 0
    waves = [w for w in placement.waves if w.minibatch == 0]
    for first in range(0, len(waves), waves_in_flight):
        together = waves[first : first + waves_in_flight]
        pending += together
        most = max(most, len(pending))
        if not waits_for_all:
            pending = [w for w in pending if not placement.ready(w, together[-1].index)]
    return most


def moment_copies(
    placement: Placement, grpo: GrpoConfig, rewards: int, waves_in_flight: int = 1
) -> int:
    """Most copies of the gradient buffers that reweight holds, one trajectory a wave.

    A wave collects in buffers of its own, which become its group's zeroth moment; from the group's
    second trajectory here on there is a first moment for each reward too. Groups are weighed into a
    total when they are complete, or pooled where only the standard deviation is missing. The
    wrapper's own buffers serve as one of them.
    """
    waits = needs_all_groups(grpo.advantage, grpo.reward_combination)
    pools = mean_is_final_early(grpo.advantage, grpo.reward_combination)
    terms = 1 if grpo.reward_combination == "reward_sum" else rewards
    trajectories: Counter[int] = Counter()
    # The KL term collects in the total from the first step on.
    total, pooled = int(grpo.kl_beta > 0), 0
    waves = [w for w in placement.waves if w.minibatch == 0]
    most = 0

    def note(others: int) -> None:
        nonlocal most
        firsts = sum(terms for count in trajectories.values() if count > 1)
        most = max(most, len(trajectories) + firsts + total + pooled + others)

    for first in range(0, len(waves), waves_in_flight):
        together = waves[first : first + waves_in_flight]
        note(len(together))
        for waiting, wave in zip(range(len(together) - 1, -1, -1), together):
            for group in (slot.group for slot in wave.slots):
                trajectories[group] += 1
            note(waiting + (trajectories[group] > 1))
        is_last = together[-1] is placement.waves[-1]
        if waits and not is_last and not pools:
            continue
        after = together[-1].index
        for group in [g for g in trajectories if placement.completed_by[g] <= after]:
            total, pooled = (total, 1) if waits and not is_last else (1, pooled)
            note(0)
            del trajectories[group]
    if pooled:
        total = 1
        note(0)
    return most - 1
