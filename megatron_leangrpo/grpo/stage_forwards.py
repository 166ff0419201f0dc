# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What one pipeline stage runs for a velocity: its part of each forward of policy and reference.

A message between two stages holds the states of all of them, one after the other.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from megatron_leangrpo import platform
from megatron_leangrpo.conditioning.encoders import Conditioning
from megatron_leangrpo.grpo.policy import Forward, Policy
from megatron_leangrpo.pipeline.order import Item
from megatron_leangrpo.pipeline.transport import Boundary, StageTransport

Tensors = tuple[torch.Tensor, ...]


class StageForwards:
    """This stage's part of the forwards of a velocity, and of the reference's where it is wanted.

    Args:
        policy: over this rank's stage of the transformer.
        reference: over the same stage of the frozen base; None where its velocity is not wanted.
        timestep, conditioning: where the velocity is wanted.
    """

    def __init__(
        self,
        policy: Policy,
        reference: Policy | None,
        timestep: torch.Tensor,
        conditioning: Conditioning,
    ) -> None:
        self._policy, self._reference, self._timestep = policy, reference, timestep
        own = policy.forwards(timestep, conditioning)
        others = [] if reference is None else reference.forwards(timestep, conditioning)
        self._own = len(own)
        self._forwards = [(policy, forward) for forward in own]
        self._forwards += [(reference, replace(f, with_gradient=False)) for f in others]
        self._received = [_boundary(f.model.received, p, f) for p, f in self._forwards]
        self.received: Boundary = tuple(spec for state in self._received for spec in state)
        """What comes from the stage before."""
        sent = [_boundary(f.model.boundary, p, f) for p, f in self._forwards]
        self.sent: Boundary = tuple(spec for state in sent for spec in state)
        """What goes to the next stage."""

    def run(self, inputs: Tensors) -> tuple[Tensors, torch.Tensor | None]:
        """What goes to the next stage; on the last one the velocity, and the reference's.

        `inputs` are the latents alone on the first stage.
        """
        states: list[Tensors] = []
        stage, remaining = self._policy.model.stage, list(inputs)
        for (policy, forward), received in zip(self._forwards, self._received):
            if stage.is_first:
                state: Tensors = (policy.inputs(forward, inputs[0]),)
            else:
                state = tuple(remaining[: len(received)])
                del remaining[: len(received)]
            with torch.set_grad_enabled(torch.is_grad_enabled() and forward.with_gradient):
                states.append(_run_stage(policy, forward, state))
        if not stage.is_last:
            return tuple(tensor for state in states for tensor in state), None
        velocities = [velocity for (velocity,) in states]
        velocity = self._policy.combined(velocities[: self._own], self._timestep)
        if self._reference is None:
            return (velocity,), None
        return (velocity,), self._reference.combined(velocities[self._own :], self._timestep)


def _boundary(side: Callable[..., Boundary], policy: Policy, forward: Forward) -> Boundary:
    specs = side(len(forward.timestep), forward.conditioning, policy.grid)
    return tuple(replace(spec, differentiable=forward.with_gradient) for spec in specs)


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
