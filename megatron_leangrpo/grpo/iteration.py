# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""One GRPO iteration: rollouts in waves, rewards, advantages, backward, one update after another.

    prompts -> groups -> waves of rollouts -> rewards -> advantages -> schedule.backward -> update

Collectives over the data-parallel ranks happen once a wave (rewards) and once an update
(gradients), whatever the advantages turn out to be.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from megatron_leangrpo import platform
from megatron_leangrpo.conditioning.prompts import Prompt
from megatron_leangrpo.config import GrpoConfig
from megatron_leangrpo.grpo.advantages import (
    Advantages,
    mean_is_final_early,
    needs_all_groups,
)
from megatron_leangrpo.grpo.data_parallel import collecting_gradients, reduce_gradients
from megatron_leangrpo.grpo.early_reduction import EarlyReduction
from megatron_leangrpo.grpo.jagg_check import GradientCheck
from megatron_leangrpo.grpo.passes import WholeModel
from megatron_leangrpo.grpo.pipelined import PipelinedModel
from megatron_leangrpo.grpo.placement import Group, Placement, Wave, place
from megatron_leangrpo.grpo.reward_table import RewardTable
from megatron_leangrpo.grpo.rollout import RolloutSettings, WaveRollout
from megatron_leangrpo.grpo.routing import WindowRouter
from megatron_leangrpo.grpo.schedules import ReplaySchedule, Schedule
from megatron_leangrpo.grpo.schedules.jagg import single_steps
from megatron_leangrpo.grpo.scoring import Scorer
from megatron_leangrpo.grpo.stats import UpdateStats
from megatron_leangrpo.grpo.timing import PhaseTimer
from megatron_leangrpo.grpo.trajectory import WaveTrajectory
from megatron_leangrpo.precision.scaling import recording_scales, renew_scales


@dataclass
class IterationResult:
    """What an iteration measured."""

    metrics: dict[str, float]
    groups: list[Group]
    table: RewardTable
    updates: list[dict[str, float]] = field(default_factory=list)


class IterationRunner:
    """Runs iterations with one schedule.

    Args:
        model: the data-parallel wrapper whose buffers collect the gradient.
        passes: runs the rollouts and backwards of the transformer inside it.
        encode: prompts to conditioning, on the policy's device and dtype.
        router: groups trained steps into the windows of jagg; by default none.
        early: starts the reduction beside an update's last backward; by default it comes after.
        on_wave: called after each rollout and scoring, for progress.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        passes: WholeModel | PipelinedModel,
        schedule: Schedule,
        settings: RolloutSettings,
        config: GrpoConfig,
        encode: Callable[[Sequence[str]], object],
        scorer: Scorer,
        router: WindowRouter | None = None,
        early: EarlyReduction | None = None,
    ) -> None:
        self.model, self.passes, self.schedule = model, passes, schedule
        self.router = router or WindowRouter()
        self.settings, self.config = settings, config
        self.encode, self.scorer = encode, scorer
        self.replay = ReplaySchedule(passes, schedule.objective, schedule.buffers)
        self.on_wave: Callable[[Wave], None] = lambda wave: None
        self.early = early
        self._check: GradientCheck | None = None
        self._around_last: Callable[[], AbstractContextManager] = nullcontext

    def place(self, groups: Sequence[Group], iteration: int) -> Placement:
        """Return this rank's waves of an iteration."""
        return place(
            groups,
            self.config.group_size,
            dp_rank=platform.dp_rank(),
            dp_size=platform.dp_size(),
            placement=self.config.placement,
            micro_batch_size=self.config.micro_batch_size,
            updates=self.config.updates_per_rollout,
            seed=self.settings.seed,
            iteration=iteration,
        )

    def count_waves(self, groups: int) -> int:
        """Return how many waves each rank rolls out in an iteration of `groups` groups."""
        config = self.config
        share = groups * config.group_size // config.updates_per_rollout // platform.dp_size()
        return -(-share // config.micro_batch_size) * config.updates_per_rollout

    def run(
        self,
        iteration: int,
        prompts: Sequence[Prompt],
        apply_update: Callable[[], dict[str, float]] | None = None,
    ) -> IterationResult:
        """Roll out and train on one batch of prompts.

        `apply_update` takes an optimizer step on the reduced gradient and returns its metrics;
        without it the gradient of the first update is left in the buffers.
        """
        timer, groups = PhaseTimer(), [Group(i, prompt) for i, prompt in enumerate(prompts)]
        placement = self.place(groups, iteration)
        table = RewardTable(len(groups), self.config.group_size, self.scorer.names)
        result, stats = IterationResult({}, groups, table), UpdateStats()
        trajectories = len(groups) * self.config.group_size // self.config.updates_per_rollout
        scale = 1 / (trajectories * self.settings.selector.num_trained(iteration))
        for schedule in (self.schedule, self.replay):
            schedule.begin(scale)
        self._check = self._check_of(iteration)
        reduces_early = self.early is not None and apply_update is not None and not self._check
        self._around_last = self.early.last_backward if reduces_early else nullcontext
        with collecting_gradients(self.model), recording_scales(self.model):
            pending = self._run_waves(placement, groups, iteration, table, timer, stats)
        with timer.phase("update"):
            checked = {} if self._check is None else self._check.measure(self.model)
            result.updates.append(
                self._finish_update(stats, apply_update, reduced=self._check is not None)
            )
            if apply_update is not None:
                for minibatch in range(1, self.config.updates_per_rollout):
                    result.updates.append(
                        self._replay_update(minibatch, pending, table, apply_update)
                    )
        if apply_update is not None:
            renew_scales(self.model)
        result.metrics = {
            **self._reward_metrics(table),
            **result.updates[0],
            **self.router.finish(),
            **checked,
            **timer.metrics(),
        }
        for name, pick in (("ratio_min", min), ("ratio_max", max)):
            result.metrics[name] = pick(update[name] for update in result.updates)
        return result

    def _run_waves(
        self,
        placement: Placement,
        groups: list[Group],
        iteration: int,
        table: RewardTable,
        timer: PhaseTimer,
        stats: UpdateStats,
    ) -> list[WaveTrajectory]:
        """Roll out, score and train the first mini-batch; returns the others' trajectories."""
        pending: list[WaveTrajectory] = []

        def rewarded(scores: Sequence[tuple[WaveTrajectory, Callable[[], torch.Tensor]]]) -> None:
            with timer.phase("reward"):
                for trajectory, score in scores:
                    table.add_wave(trajectory.wave, score())
            with timer.phase("update"):
                self._train_ready([t for t, _ in scores], pending, placement, table, stats)
            for trajectory, _ in scores:
                self.on_wave(trajectory.wave)

        scoring: list[list[tuple[WaveTrajectory, Callable[[], torch.Tensor]]]] = []
        waves, at_a_time = placement.waves, self.passes.waves_in_flight
        for first in range(0, len(waves), at_a_time):
            together = waves[first : first + at_a_time]
            with timer.phase("rollout"):
                trajectories = self._roll_out(together, groups, iteration)
            while scoring:
                rewarded(scoring.pop())
            with timer.phase("reward"):
                scoring.append([(t, self.scorer.submit(t, groups)) for t in trajectories])
            # Graphs do not wait for longer than they must; other waves are scored beside a rollout.
            if self._frees_graphs(together, placement) or together[-1] is waves[-1]:
                rewarded(scoring.pop())
        with timer.phase("update"):
            self.schedule.finish()
        return pending

    def _frees_graphs(self, newest: Sequence[Wave], placement: Placement) -> bool:
        """Whether the rewards of the newest waves let go of graphs, or of reweight's gradients."""
        if not self.schedule.keeps_graph or newest[-1].minibatch != 0:
            return False
        waits = needs_all_groups(self.config.advantage, self.config.reward_combination)
        return self.schedule.at_once or (not waits and placement.completes(newest))

    def _check_of(self, iteration: int) -> GradientCheck | None:
        interval = self.config.jagg_check_interval
        if interval == 0 or not self.router.approximated or iteration % interval:
            return None
        return GradientCheck(self.replay, self.schedule.buffers)

    def _roll_out(
        self, waves: Sequence[Wave], groups: list[Group], iteration: int
    ) -> list[WaveTrajectory]:
        rollouts = []
        for wave in waves:
            plans = self.settings.plans(wave, iteration)
            windows = self.router.windows(plans) if wave.minibatch == 0 else single_steps(plans)
            conditioning = self.encode([groups[slot.group].prompt.text for slot in wave.slots])
            dtype = self.passes.policy.latent_dtype
            sampling = self.settings.begin(wave, iteration, plans, dtype)
            rollouts.append(WaveRollout(sampling, wave, conditioning, windows))
        trajectories = self.passes.roll_out(rollouts, self.schedule)
        for trajectory in trajectories:
            trajectory.check_finite(iteration + 1)
        for rollout in rollouts:
            if rollout.is_on_policy:
                self.router.observe(rollout.trajectory, rollout.sampling.plans)
        return trajectories

    def _train_ready(
        self,
        newest: Sequence[WaveTrajectory],
        pending: list[WaveTrajectory],
        placement: Placement,
        table: RewardTable,
        stats: UpdateStats,
    ) -> None:
        """Train the first mini-batch's waves whose advantages are known after the newest waves."""
        config, after = self.config, newest[-1].wave.index
        pending += newest
        advantages = self._advantages(table)
        terms = table.terms(self.scorer.weights, config.reward_combination)
        for trajectory in newest:
            if trajectory.wave.minibatch == 0:
                own = [table.index(slot) for slot in trajectory.wave.slots]
                self.schedule.wave_rewarded(trajectory, terms[:, own])
        ready = [t for t in pending if t.wave.minibatch == 0 and placement.ready(t.wave, after)]
        waits = needs_all_groups(config.advantage, config.reward_combination)
        if waits and after != placement.waves[-1].index:
            if mean_is_final_early(config.advantage, config.reward_combination):
                for slot in (slot for t in ready for slot in t.wave.slots):
                    known = advantages.select([table.index(slot)])
                    self.schedule.group_complete(slot.group, known)
            return
        for trajectory in ready:
            pending.remove(trajectory)
        is_last = after >= max(w.index for w in placement.waves if w.minibatch == 0)
        if ready:
            self._train(self.schedule, ready, table, advantages, stats, is_last)

    def _replay_update(
        self,
        minibatch: int,
        pending: list[WaveTrajectory],
        table: RewardTable,
        apply_update: Callable[[], dict[str, float]],
    ) -> dict[str, float]:
        """Train an off-policy mini-batch with the true ratio and clip."""
        stats, advantages = UpdateStats(), self._advantages(table)
        with collecting_gradients(self.model):
            own = [t for t in pending if t.wave.minibatch == minibatch]
            self._train(self.replay, own, table, advantages, stats, is_last=True)
        return self._finish_update(stats, apply_update)

    def _train(
        self,
        schedule: Schedule,
        trajectories: Sequence[WaveTrajectory],
        table: RewardTable,
        advantages: Advantages,
        stats: UpdateStats,
        is_last: bool,
    ) -> None:
        ready = [
            (t, advantages.select([table.index(slot) for slot in t.wave.slots]))
            for t in trajectories
        ]
        if schedule is self.schedule and self._check is not None:
            self._check.keep(ready)
        schedule.train(ready, stats, self._around_last if is_last else nullcontext)

    def _advantages(self, table: RewardTable) -> Advantages:
        config = self.config
        return table.advantages(self.scorer.weights, config.advantage, config.reward_combination)

    def _finish_update(
        self,
        stats: UpdateStats,
        apply_update: Callable[[], dict[str, float]] | None,
        reduced: bool = False,
    ) -> dict[str, float]:
        if not reduced:
            # Without an update the caller looks at the gradient itself.
            reduce_gradients(self.model, whole=apply_update is None)
        metrics = stats.reduced()
        if apply_update is not None:
            metrics.update(apply_update())
        return metrics

    def _reward_metrics(self, table: RewardTable) -> dict[str, float]:
        total = table.total(self.scorer.weights)
        kept = total[~table.dropped]
        constant = kept.max(dim=1).values == kept.min(dim=1).values
        # Not a number where every group was dropped.
        return {
            **{f"reward_{name}": table.mean(name) for name in table.names},
            "reward_mean": kept.mean().item(),
            "reward_std": kept.std(dim=1, correction=0).mean().item(),
            "zero_std_ratio": constant.double().mean().item(),
            "dropped_groups": float(table.dropped.sum()),
        }
