# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What one pipeline stage runs for a velocity: its part of each forward of policy and reference.

A message between two stages holds the states of all of them, one after the other.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from megatron_leangrpo import platform
from megatron_leangrpo.conditioning.encoders import Conditioning
from megatron_leangrpo.grpo.policy import Forward, Policy
from megatron_leangrpo.pipeline.order import Item
from megatron_leangrpo.pipeline.transport import Boundary, StageTransport

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Evaluation:
    """Where a velocity is wanted."""

    timestep: torch.Tensor
    conditioning: Conditioning
    with_reference: bool
    """The reference's velocity at the same latents is wanted too."""


class StageForwards:
    """This stage's part of the forwards.

    Args:
        policy: over this rank's stage of the transformer.
        reference: over the same stage of the frozen base, where there is a KL term.
    """

    def __init__(self, policy: Policy, reference: Policy | None) -> None:
        self.policy, self.reference = policy, reference
        self.stage = policy.model.stage

    def run(self, evaluation: Evaluation, inputs: Tensors) -> tuple[Tensors, torch.Tensor | None]:
        """What goes to the next stage; on the last one the velocity, and the reference's.

        `inputs` are the latents alone on the first stage.
        """
        states: list[Tensors] = []
        remaining, forwards = list(inputs), self._forwards(evaluation)
        for policy, forward in forwards:
            if self.stage.is_first:
                state: Tensors = (policy.inputs(forward, inputs[0]),)
            else:
                count = len(self._boundary(forward.model.received, policy, forward))
                state = tuple(remaining[:count])
                del remaining[:count]
            with torch.set_grad_enabled(torch.is_grad_enabled() and forward.with_gradient):
                states.append(_run_stage(policy, forward, state))
        if not self.stage.is_last:
            return tuple(tensor for state in states for tensor in state), None
        velocities = [velocity for (velocity,) in states]
        own = sum(policy is self.policy for policy, _ in forwards)
        velocity = self.policy.combined(velocities[:own], evaluation.timestep)
        if not evaluation.with_reference:
            return (velocity,), None
        return (velocity,), self.reference.combined(velocities[own:], evaluation.timestep)

    def received(self, evaluation: Evaluation) -> Boundary:
        """What comes from the stage before."""
        return self._all_boundaries(evaluation, "received")

    def sent(self, evaluation: Evaluation) -> Boundary:
        """What goes to the next stage."""
        return self._all_boundaries(evaluation, "boundary")

    def _all_boundaries(self, evaluation: Evaluation, side: str) -> Boundary:
        return tuple(
            spec
            for policy, forward in self._forwards(evaluation)
            for spec in self._boundary(getattr(forward.model, side), policy, forward)
        )

    def _boundary(
        self, side: Callable[..., Boundary], policy: Policy, forward: Forward
    ) -> Boundary:
        specs = side(len(forward.timestep), forward.conditioning, policy.grid)
        return tuple(replace(spec, differentiable=forward.with_gradient) for spec in specs)

    def _forwards(self, evaluation: Evaluation) -> list[tuple[Policy, Forward]]:
        where = evaluation.timestep, evaluation.conditioning
        forwards = [(self.policy, forward) for forward in self.policy.forwards(*where)]
        if evaluation.with_reference:
            forwards += [
                (self.reference, replace(forward, with_gradient=False))
                for forward in self.reference.forwards(*where)
            ]
        return forwards


def _run_stage(policy: Policy, forward: Forward, state: Tensors) -> Tensors:
    return forward.model.run_stage(state, forward.timestep, forward.conditioning, policy.grid)


class OneByOne:
    """A `policy.StepByStep`: one forward after the other through all stages, without graphs.

    Every stage gets the velocity. For calibrations and measurements; stages wait for each other.
    """

    def __init__(self, transport: StageTransport) -> None:
        self._transport, self._calls = transport, 0

    @torch.no_grad()
    def __call__(self, policy: Policy, forward: Forward, inputs: torch.Tensor) -> torch.Tensor:
        model, transport = forward.model, self._transport
        rows, item = len(forward.timestep), Item(-1, self._calls)
        self._calls += 1
        state: Tensors = (inputs,)
        if not model.stage.is_first:
            received = model.received(rows, forward.conditioning, policy.grid)
            transport.expect("forward", received, item)
            state = transport.receive("forward", item)
        state = _run_stage(policy, forward, state)
        if model.stage.is_last:
            velocity = state[0].to(policy.latent_dtype)
        else:
            sent = model.boundary(rows, forward.conditioning, policy.grid)
            transport.send("forward", state, sent, item)
            transport.finish()
            velocity = torch.empty_like(inputs, dtype=policy.latent_dtype)
        return platform.from_last_stage(velocity)
