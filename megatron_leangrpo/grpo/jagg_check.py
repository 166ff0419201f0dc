# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Measures the gradient of an approximate schedule against the exact one of the same rollout."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from megatron_leangrpo.grpo.advantages import Advantages
from megatron_leangrpo.grpo.data_parallel import collecting_gradients, reduce_gradients
from megatron_leangrpo.grpo.gradient_buffers import GradientBuffers
from megatron_leangrpo.grpo.schedules import ReplaySchedule
from megatron_leangrpo.grpo.stats import UpdateStats
from megatron_leangrpo.grpo.trajectory import WaveTrajectory, Window


class GradientCheck:
    """Replays the trajectories of an update step by step.

    Args:
        replay: the exact schedule, begun with the update's scale.
        buffers: those that the approximate schedule collects in.
    """

    def __init__(self, replay: ReplaySchedule, buffers: GradientBuffers) -> None:
        self.replay, self.buffers = replay, buffers
        self._kept: list[tuple[WaveTrajectory, Advantages]] = []

    def keep(self, ready: Sequence[tuple[WaveTrajectory, Advantages]]) -> None:
        """Remember trajectories as data, before their backwards take them apart."""
        for trajectory, advantages in ready:
            windows = [
                Window([replace(step, velocity=step.velocity.detach())])
                for step in trajectory.steps
            ]
            self._kept.append((replace(trajectory, windows=windows), advantages))

    def measure(self, model: torch.nn.Module) -> dict[str, float]:
        """Compare, and leave the approximate gradient in the buffers, summed over all ranks."""
        approximate = self.buffers.take()
        with collecting_gradients(model):
            self.replay.train(self._kept, UpdateStats())
        self._kept.clear()
        reduce_gradients(model, whole=True)
        exact = self.buffers.take()
        self.buffers.put(approximate)
        reduce_gradients(model, whole=True)
        product = self.buffers.inner_product
        approximate = self.buffers.own
        squares = product(approximate, approximate), product(exact, exact)
        mixed = product(approximate, exact)
        self.buffers.release(exact)
        if not all(squares):
            return {}
        distance = max(squares[0] - 2 * mixed + squares[1], 0.0)
        return {
            "jagg_gradient_cosine": mixed / (squares[0] * squares[1]) ** 0.5,
            "jagg_gradient_error": (distance / squares[1]) ** 0.5,
        }
