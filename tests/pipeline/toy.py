# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""A small model cut into stages, and the same model in one piece."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
import torch.nn.functional as F

from megatron_leangrpo.pipeline.driver import StageDriver
from megatron_leangrpo.pipeline.order import (
    Item,
    Operation,
    Schedule,
    Windows,
    ends_of,
    phases,
)
from megatron_leangrpo.pipeline.times import StageTimes
from megatron_leangrpo.pipeline.transport import Alone, StageTransport, TensorSpec

BATCH, WIDTH, BLOCKS, STEPS = 2, 6, 6, 5
LATENTS = TensorSpec((BATCH, WIDTH), torch.float64)
# Residual stream and conditioning, of different dtypes as FLUX's are in mixed precision.
BOUNDARY = (LATENTS, TensorSpec((BATCH, WIDTH), torch.bfloat16))


def seeded(*key: int) -> torch.Tensor:
    """Numbers that depend on the key alone."""
    generator = torch.Generator().manual_seed(hash((7, *key)) % 2**31)
    return torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)


class Block(torch.nn.Module):
    """A residual block modulated by the conditioning."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.float64)
        self.narrow = torch.nn.Linear(2 * WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, h: torch.Tensor, vec: torch.Tensor) -> torch.Tensor:
        return h + self.narrow(F.gelu(self.wide(h * (1 + vec.double()))))


class Toy(torch.nn.Module):
    """Embedding, blocks and output; a stage uses a part of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(BLOCKS))
        self.out = torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def condition(self, item: Item) -> torch.Tensor:
        return self.embed(torch.full((BATCH, WIDTH), 0.1 * item.step, dtype=torch.bfloat16))

    def forward(self, item: Item, x: torch.Tensor) -> torch.Tensor:
        vec, h = self.condition(item), x
        for block in self.blocks:
            h = block(h, vec)
        return self.out(h)


class ToyStage:
    """The part of the model that one stage runs."""

    def __init__(
        self,
        model: Toy,
        split: tuple[int, ...],
        stage: int,
        before: Callable[[Item], None] | None = None,
    ) -> None:
        self.before = before
        self.model, self.is_first, self.is_last = model, stage == 0, stage == len(split) - 1
        begin = sum(split[:stage])
        self.blocks = model.blocks[begin : begin + split[stage]]

    def __call__(self, item: Item, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        if self.before is not None:
            self.before(item)
        h, vec = (inputs[0], self.model.condition(item)) if self.is_first else inputs
        for block in self.blocks:
            h = block(h, vec)
        # A view, as slices of joined tokens are.
        return (self.model.out(h),) if self.is_last else (h.view_as(h), vec)


class Ends:
    """Hooks: a stochastic step after every velocity, and a gradient buffer for each trajectory."""

    def __init__(self, model: Toy) -> None:
        self.parameters = dict(model.named_parameters())
        self.latents: dict[Item, torch.Tensor] = {}
        self.velocities: dict[Item, torch.Tensor] = {}
        self.final: dict[int, torch.Tensor] = {}
        self.buffers: dict[int, dict[str, torch.Tensor | None]] = defaultdict(dict)
        self.current: int | None = None

    def inputs(self, item: Item, latents: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        if latents is None:
            # Step 0, or a replayed step.
            latents = self.latents.get(item, seeded(item.trajectory))
        self.latents[item] = latents
        return (latents,)

    def drawn(self, item: Item, velocity: torch.Tensor) -> torch.Tensor:
        if item in self.velocities:
            # Replayed: ratio 1 means the same bits.
            assert torch.equal(velocity, self.velocities[item])
        self.velocities[item] = velocity
        assert not velocity.requires_grad
        latents = next_latents(item, velocity)
        if item.step == STEPS - 1:
            self.final[item.trajectory] = latents
        return latents

    def times(self, item: Item) -> int:
        return 1

    def cotangent(self, item: Item, time: int) -> torch.Tensor:
        assert item in self.velocities
        return seeded(item.step, item.trajectory, 2)

    def enter(self, item: Item, time: int) -> None:
        self.store()
        self.current = item.trajectory
        for name, parameter in self.parameters.items():
            parameter.grad = self.buffers[self.current].get(name)

    def done(self, item: Item) -> None:
        """There is nothing to let go of."""

    def store(self) -> None:
        """Take what the last backward left in the parameters."""
        if self.current is not None:
            grads = {name: parameter.grad for name, parameter in self.parameters.items()}
            self.buffers[self.current] = grads


class ClockedTransport:
    """A transport whose messages carry the virtual time at which they were sent."""

    STAMP = TensorSpec((1,), torch.float64)

    def __init__(self, transport: StageTransport, latency: float) -> None:
        self.stage, self.stages = transport.stage, transport.stages
        self.transport, self.latency, self.now = transport, latency, 0.0

    def expect(self, direction, boundary, item) -> None:
        self.transport.expect(direction, (*boundary, self.STAMP), item)

    def receive(self, direction, item) -> tuple[torch.Tensor, ...]:
        *tensors, sent = self.transport.receive(direction, item)
        self.now = max(self.now, sent.item() + self.latency)
        return tuple(tensors)

    def send(self, direction, tensors, boundary, item) -> None:
        stamp = torch.tensor([self.now], dtype=torch.float64)
        self.transport.send(direction, (*tensors, stamp), (*boundary, self.STAMP), item)

    def finish(self) -> None:
        self.transport.finish()


def run_clocked(
    transport: StageTransport, schedule: Schedule, windows: Windows, times: StageTimes
) -> list[float]:
    """Run a schedule on empty stages of given times; when this stage is done with each phase."""
    clocked, nothing = ClockedTransport(transport, times.latency), torch.zeros(1)
    spec, stage = TensorSpec.of(nothing), transport.stage

    class Waits:
        def inputs(self, item, latents):
            return (nothing,)

        def drawn(self, item, velocity):
            return nothing

        def times(self, item):
            return 1

        def cotangent(self, item, time):
            return nothing

        def enter(self, item, time):
            clocked.now += times.backward[stage]

        def done(self, item):
            pass

    def compute(item, inputs):
        clocked.now += times.forward[stage]
        return (inputs[0] * torch.ones(1, requires_grad=True),)

    shapes = dict.fromkeys(("receives", "sends", "latents"), lambda item: (spec,))
    driver = StageDriver(compute, clocked, Waits(), **shapes)
    ends = []
    for phase in phases(schedule, transport.stages, STEPS, windows):
        clocked.now = 0.0
        driver.run(phase)
        ends.append(clocked.now)
    return ends


def next_latents(item: Item, velocity: torch.Tensor) -> torch.Tensor:
    """A stochastic step that forgets the latents, so that errors cannot hide in them."""
    return 0.7 * velocity + 0.1 * seeded(item.step, item.trajectory, 1)


def run_stage(
    transport: StageTransport | Alone,
    split: tuple[int, ...],
    schedule: Schedule,
    windows: Windows,
    before: Callable[[Item], None] | None = None,
) -> dict:
    """Run a schedule on this stage; what it computed, and what it did.

    `before` is called at the beginning of every forward.
    """
    stage, model = transport.stage, Toy()
    ends = Ends(model)
    driver = StageDriver(
        ToyStage(model, split, stage, before),
        transport,
        ends,
        receives=lambda item: BOUNDARY,
        sends=lambda item: BOUNDARY,
        latents=lambda item: (LATENTS,),
    )
    done: list[tuple[Operation, ...]] = []
    for phase in phases(schedule, len(split), STEPS, windows):
        trace: list[Operation] = []
        driver.on_operation = trace.append
        driver.run(phase)
        done.append(tuple(trace))
    ends.store()
    grads = {m: {k: g for k, g in own.items() if g is not None} for m, own in ends.buffers.items()}
    return {"final": ends.final, "grads": grads, "done": done, "most_kept": driver.most_kept}


def reference(windows: Windows) -> dict:
    """The same rollouts and gradients by the model in one piece."""
    model, final, grads = Toy(), {}, {}
    for m, own in enumerate(windows):
        model.zero_grad()
        x = seeded(m)
        ends = {step for window in own for step in ends_of(window)}
        for step in range(STEPS):
            item = Item(step, m)
            velocity = model(item, x)
            if step in ends:
                velocity.backward(seeded(step, m, 2))
            x = next_latents(item, velocity.detach())
        final[m] = x
        grads[m] = {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
    return {"final": final, "grads": grads}
