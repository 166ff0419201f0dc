# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Runs a stage's part of a phase: receives, computes, keeps graphs as long as needed, sends.

The driver knows nothing of steps, noise or losses: on the first and the last stage it asks its
hooks, and all arithmetic is in the stage's function.
"""

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_leangrpo.pipeline.order import Item, Operation, Phase
from megatron_leangrpo.pipeline.transport import (
    Alone,
    Boundary,
    StageTransport,
    differentiable,
)

Tensors = tuple[torch.Tensor, ...]

StageFunction = Callable[[Item, Tensors], Tensors]
"""A stage's forward: what came in, or the first stage's own inputs, to what goes out. The last
stage returns the velocity alone."""


Boundaries = Callable[[Item], Boundary]
"""What passes between two stages for an item."""

Around = Callable[[], AbstractContextManager]


class Hooks(Protocol):
    """What happens at the two ends of the pipeline, and to gradients.

    An item's backward may run several times, once for each gradient that is collected for itself.
    """

    def inputs(self, item: Item, latents: torch.Tensor | None) -> Tensors:
        """First stage: the function's inputs.

        `latents` come from the ring, None for a trajectory's first step and outside a ring.
        """

    def drawn(self, item: Item, velocity: torch.Tensor) -> torch.Tensor | None:
        """Last stage: take a velocity, without its graph; in a ring return the next latents."""

    def times(self, item: Item) -> int:
        """Every stage: how often the backward of an item runs."""

    def cotangent(self, item: Item, time: int) -> torch.Tensor:
        """Last stage: the gradient with respect to an item's velocity, `time` counted from 0."""

    def enter(self, item: Item, time: int) -> None:
        """Every stage: a backward of the item comes next; switch gradient buffers here."""

    def done(self, item: Item) -> None:
        """Every stage: nothing else is run for the item in this phase."""


@dataclass(frozen=True)
class _Graph:
    """What a backward needs of its forward: its inputs, and where the outputs that gradients come
    for hang; not the outputs.
    """

    inputs: Tensors
    outputs: tuple[GradientEdge | None, ...]


class StageDriver:
    """One stage of a pipeline.

    Args:
        function: the stage's forward.
        transport: messages to the other stages.
        hooks: the ends of the pipeline.
        receives: what the stage before sends; not asked on the first stage.
        sends: what the stage after receives; not asked on the last stage.
        latents: what the ring hands from the last stage to the first.
    """

    def __init__(
        self,
        function: StageFunction,
        transport: StageTransport | Alone,
        hooks: Hooks,
        *,
        receives: Boundaries,
        sends: Boundaries,
        latents: Boundaries,
    ) -> None:
        self._function, self._transport, self._hooks = function, transport, hooks
        self._receives, self._sends, self._latents = receives, sends, latents
        self._is_first = transport.stage == 0
        self._is_last = transport.stage == transport.stages - 1
        self._kept: dict[Item, _Graph] = {}
        self._coming: dict[str, deque[Item]] = {}
        self.on_operation: Callable[[Operation], None] = lambda operation: None
        """Called after everything that is run, for traces."""
        self.most_kept = 0
        """Most graphs that were kept at once."""

    def forget(self, items: Iterable[Item]) -> None:
        """Let go of graphs whose backward never comes."""
        for item in items:
            self._kept.pop(item, None)

    def run(self, phase: Phase, around_last: Around = nullcontext) -> None:
        """Run this stage's program, its last backward in `around_last()`.

        Graphs that it leaves are kept for the next phase.
        """
        assert phase.stages == self._transport.stages, (phase.stages, self._transport.stages)
        program = phase.programs[self._transport.stage]
        self._expect_first(program)
        forwards = {op.item for op in program if op.kind == "forward"} if phase.ring else set()
        begun: set[int] = set()
        last = max((n for n, op in enumerate(program) if op.kind == "backward"), default=None)
        last_of = {op.item: n for n, op in enumerate(program)}
        for n, operation in enumerate(program):
            item = operation.item
            if operation.kind == "backward":
                self._backward(item, around_last if n == last else nullcontext)
            else:
                from_ring = phase.ring and item.trajectory in begun
                begun.add(item.trajectory)
                following = item._replace(step=item.step + 1)
                self._forward(operation, from_ring, following if following in forwards else None)
            if n == last_of[item]:
                self._hooks.done(item)
            self.on_operation(operation)
        self._transport.finish()

    def _expect_first(self, program: tuple[Operation, ...]) -> None:
        for direction in ("forward", "backward"):
            items = deque(op.item for op in program if op.kind == direction)
            if direction == "backward":
                items = deque(item for item in items for _ in range(self._hooks.times(item)))
            has_source = not (self._is_first if direction == "forward" else self._is_last)
            self._coming[direction] = items if has_source else deque()
            self._expect_next(direction)

    def _expect_next(self, direction: str) -> None:
        if self._coming[direction]:
            item = self._coming[direction].popleft()
            if direction == "forward":
                boundary = self._receives(item)
            else:
                boundary = differentiable(self._sends(item))
            self._transport.expect(direction, boundary, item)

    def _receive(self, direction: str, item: Item) -> Tensors:
        tensors = self._transport.receive(direction, item)
        # The next message may arrive while this one is worked on.
        self._expect_next(direction)
        return tensors

    def _forward(self, operation: Operation, from_ring: bool, following: Item | None) -> None:
        item, keeps = operation.item, operation.keeps
        inputs = self._inputs(item, keeps, from_ring)
        with torch.set_grad_enabled(keeps):
            outputs = self._function(item, inputs)
        if keeps:
            self._keep(item, inputs, outputs)
            self.most_kept = max(self.most_kept, len(self._kept))
        if not self._is_last:
            self._transport.send("forward", outputs, self._sends(item), item)
        else:
            (velocity,) = outputs
            latents = self._hooks.drawn(item, velocity.detach())
            if following is not None:
                assert latents is not None, f"no latents after {item}"
                self._transport.send("latents", (latents,), self._latents(following), following)
        if self._is_first and following is not None:
            self._transport.expect("latents", self._latents(following), following)

    def _keep(self, item: Item, inputs: Tensors, outputs: Tensors) -> None:
        if not self._is_last:
            sent = zip(outputs, self._sends(item), strict=True)
            outputs = tuple(x for x, spec in sent if spec.differentiable)
        edges = tuple(get_gradient_edge(x) if x.requires_grad else None for x in outputs)
        self._kept[item] = _Graph(inputs, edges)

    def _inputs(self, item: Item, keeps: bool, from_ring: bool) -> Tensors:
        if self._is_first:
            latents = self._transport.receive("latents", item)[0] if from_ring else None
            return self._hooks.inputs(item, latents)
        received = self._receive("forward", item)
        for x, spec in zip(received, self._receives(item)):
            x.requires_grad_(keeps and spec.differentiable)
        return received

    def _backward(self, item: Item, around_last: Around) -> None:
        graph, times = self._kept.pop(item), self._hooks.times(item)
        for time in range(times):
            is_last = time == times - 1
            with around_last() if is_last else nullcontext():
                self._run_backward(item, graph, time, retain_graph=not is_last)

    def _run_backward(self, item: Item, graph: _Graph, time: int, retain_graph: bool) -> None:
        if self._is_last:
            gradients: Tensors = (self._hooks.cotangent(item, time),)
        else:
            gradients = self._receive("backward", item)
        self._hooks.enter(item, time)
        pairs = [(e, g) for e, g in zip(graph.outputs, gradients, strict=True) if e is not None]
        if pairs:
            torch.autograd.backward(
                [edge for edge, _ in pairs],
                [gradient for _, gradient in pairs],
                retain_graph=retain_graph,
            )
        if not self._is_first:
            leaves = [x for x in graph.inputs if x.requires_grad]
            # An input that nothing depends on has no gradient of its own.
            back = tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)
            for leaf in leaves:
                leaf.grad = None
            self._transport.send("backward", back, differentiable(self._receives(item)), item)
