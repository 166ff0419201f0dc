# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Rollouts and backwards of a transformer that is cut into pipeline stages.

Every stage runs the same program of waves, rewards and advantages. The last one draws the steps and
knows the loss; the first one keeps the latents of the steps that are run again; in between a stage
has its blocks' part of each forward and backward, in the order of `pipeline.order`.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from megatron_leangrpo import platform
from megatron_leangrpo.diffusion.sampler import CHECKED
from megatron_leangrpo.grpo.gradient_buffers import GradientBuffers
from megatron_leangrpo.grpo.policy import Policy
from megatron_leangrpo.grpo.rollout import WaveRollout
from megatron_leangrpo.grpo.schedules.base import Around, Schedule, Term, Terms, end_cotangents
from megatron_leangrpo.grpo.stage_forwards import StageForwards, Tensors
from megatron_leangrpo.grpo.trajectory import TrainedStep, WaveTrajectory, Window
from megatron_leangrpo.pipeline.driver import StageDriver
from megatron_leangrpo.pipeline.order import Item, Phase, phases, replay_phase, retained_phase
from megatron_leangrpo.pipeline.transport import Boundary, StageTransport, TensorSpec


class PipelinedModel:
    """This rank's stage; an instance of `schedules.base.Passes` and of `pipeline.driver.Hooks`.

    An item's trajectory is the number of its wave.

    Args:
        policy: over this stage of the transformer whose weights are trained.
        reference: the same stage of the frozen base policy; only needed for a KL term.
        buffers: where backwards collect the gradient.
        transport: messages to the other stages.
        waves_in_flight: how many waves are rolled out together.
    """

    def __init__(
        self,
        policy: Policy,
        reference: Policy | None,
        buffers: GradientBuffers,
        transport: StageTransport,
        waves_in_flight: int,
    ) -> None:
        self.policy, self.reference, self.buffers = policy, reference, buffers
        self.waves_in_flight, self._stages = waves_in_flight, transport.stages
        self._stage = policy.model.stage
        self.driver = StageDriver(
            self._run_stage,
            transport,
            self,
            receives=lambda item: self._forwards_of(item).received,
            sends=lambda item: self._forwards_of(item).sent,
            latents=self._latents,
        )
        self._rollouts: dict[int, WaveRollout] = {}
        """Of the ring that is running; empty in an update."""
        self._trajectories: dict[int, WaveTrajectory] = {}
        self._terms: Terms = _no_terms
        self._terms_of: dict[int, Sequence[Term]] = {}
        self._forwards: dict[Item, StageForwards] = {}
        """Of the items that the running phase is not through with."""
        self._replayed: dict[Item, torch.Tensor] = {}
        self._references: dict[Item, torch.Tensor] = {}
        self._cotangents: dict[tuple[Item, int], torch.Tensor] = {}

    def roll_out(
        self, rollouts: Sequence[WaveRollout], schedule: Schedule | None = None
    ) -> list[WaveTrajectory]:
        """Sample waves together; `schedule` says which graphs of on-policy waves are kept."""
        keeps = schedule is not None and schedule.keeps_graph
        at_once = keeps and schedule.at_once
        windows = [r.windows if keeps and r.is_on_policy else () for r in rollouts]
        steps = rollouts[0].sampling.schedule.num_steps
        kind = "reweight" if at_once else "retain" if keeps else "rollout"
        ring = phases(kind, self._stages, steps, windows)[0]
        self._rollouts = {r.trajectory.wave.index: r for r in rollouts}
        self._run(ring, [r.trajectory for r in rollouts], schedule.terms if at_once else _no_terms)
        self._rollouts = {}
        return self._with_latents(rollouts)

    def backward(
        self,
        trajectories: Sequence[WaveTrajectory],
        terms: Terms,
        *,
        replays: bool,
        around_last: Around = nullcontext,
    ) -> None:
        """Run the backwards of all windows, of several waves side by side."""
        windows = [
            [tuple(step.index for step in window.steps) for window in trajectory.windows]
            for trajectory in trajectories
        ]
        if not any(windows):
            return
        phase = (replay_phase if replays else retained_phase)(self._stages, windows)
        self._run(phase, trajectories, terms, around_last)
        for trajectory in trajectories:
            trajectory.windows.clear()

    def drop(self, trajectory: WaveTrajectory) -> None:
        """Let go of a trajectory's windows and graphs."""
        wave, windows = trajectory.wave.index, trajectory.windows
        self.driver.forget(Item(end.index, wave) for window in windows for end in window.ends)
        windows.clear()

    def _run(
        self,
        phase: Phase,
        trajectories: Sequence[WaveTrajectory],
        terms: Terms,
        around_last: Around = nullcontext,
    ) -> None:
        self._trajectories = {t.wave.index: t for t in trajectories}
        self._terms, self._terms_of = terms, {}
        with self.buffers.collecting_in(self.buffers.own):
            self.driver.run(phase.renumbered([t.wave.index for t in trajectories]), around_last)
        self._trajectories, self._terms, self._terms_of = {}, _no_terms, {}

    def _with_latents(self, rollouts: Sequence[WaveRollout]) -> list[WaveTrajectory]:
        """Give every stage the latents, and what of them is finite."""
        finished = []
        for rollout in rollouts:
            sampling = rollout.sampling
            if self._stage.is_last:
                latents, finite = sampling.result, sampling.finite.to(torch.uint8)
            else:
                latents = torch.empty_like(sampling.x)
                flags = (sampling.schedule.num_steps, len(CHECKED), len(latents))
                finite = torch.empty(flags, dtype=torch.uint8, device=latents.device)
            latents = platform.from_last_stage(latents)
            finished.append(rollout.finish(latents, platform.from_last_stage(finite).bool()))
        return finished

    def _forwards_of(self, item: Item) -> StageForwards:
        if item not in self._forwards:
            conditioning = self._trajectories[item.trajectory].conditioning
            rollout, reference = self._rollouts.get(item.trajectory), None
            if rollout is None:
                timestep = self._step(item).timestep
            else:
                timestep = rollout.sampling.timestep_at(item.step)
                reference = self.reference if rollout.is_trained(item.step) else None
            self._forwards[item] = StageForwards(self.policy, reference, timestep, conditioning)
        return self._forwards[item]

    def done(self, item: Item) -> None:
        """Let go of what an item's forwards need: a guided batch has text embeddings of its own."""
        self._forwards.pop(item, None)

    def _latents(self, item: Item) -> Boundary:
        return (TensorSpec.of(self._rollouts[item.trajectory].sampling.x),)

    def _window(self, item: Item) -> Window:
        windows = self._trajectories[item.trajectory].windows
        return next(w for w in windows for step in w.steps if step.index == item.step)

    def _step(self, item: Item) -> TrainedStep:
        return next(step for step in self._window(item).steps if step.index == item.step)

    def _run_stage(self, item: Item, inputs: Tensors) -> Tensors:
        outputs, reference = self._forwards_of(item).run(inputs)
        if reference is not None:
            self._references[item] = reference
        rollout = self._rollouts.get(item.trajectory)
        if rollout is not None and not self._stage.is_last:
            rollout.pass_by(item.step, inputs[0] if self._stage.is_first else None)
        return outputs

    def inputs(self, item: Item, latents: torch.Tensor | None) -> Tensors:
        """The latents of an item: from the ring, drawn here, or those of the rollout."""
        if latents is not None:
            return (latents,)
        rollout = self._rollouts.get(item.trajectory)
        return (self._step(item).x if rollout is None else rollout.sampling.x,)

    def drawn(self, item: Item, velocity: torch.Tensor) -> torch.Tensor | None:
        """Draw the step, or keep a velocity that was run again for its loss."""
        rollout = self._rollouts.get(item.trajectory)
        if rollout is None:
            self._replayed[item] = velocity
            return None
        rollout.draw(velocity, self._references.pop(item, None))
        return rollout.sampling.x

    def times(self, item: Item) -> int:
        """One backward for each term of the loss."""
        return len(self._terms_at(item))

    def cotangent(self, item: Item, time: int) -> torch.Tensor:
        """Gradient of a term with respect to a velocity; both ends of a window are reckoned at
        once.
        """
        if (item, time) not in self._cotangents:
            window = self._window(item)
            items = [item._replace(step=end.index) for end in window.ends]
            velocities = [self._replayed.pop(i, end.velocity) for i, end in zip(items, window.ends)]
            for n, term in enumerate(self._terms_at(item)):
                for end, cotangent in zip(items, end_cotangents(window, velocities, term)):
                    self._cotangents[end, n] = cotangent
        return self._cotangents.pop((item, time))

    def enter(self, item: Item, time: int) -> None:
        """Let the backward add to the term's buffers."""
        self.buffers.collect_in(self._terms_at(item)[time].buffers)

    def _terms_at(self, item: Item) -> Sequence[Term]:
        wave = item.trajectory
        if wave not in self._terms_of:
            self._terms_of[wave] = self._terms(self._trajectories[wave])
        return self._terms_of[wave]


def _no_terms(trajectory: WaveTrajectory) -> Sequence[Term]:
    raise AssertionError("nothing is differentiated here")
