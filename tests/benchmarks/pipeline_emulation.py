# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Stages that sleep instead of computing, on real ranks, against the simulator.

    torchrun --nproc-per-node 4 -m tests.benchmarks.pipeline_emulation

Order, driver and messages are those of a run (gloo); a forward and a backward sleep. Prints the
table of docs/pipeline.md.
"""

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_leangrpo import platform
from megatron_leangrpo.pipeline.driver import StageDriver
from megatron_leangrpo.pipeline.order import SCHEDULES, Phase, Windows, phases, same_windows
from megatron_leangrpo.pipeline.simulator import simulate_all
from megatron_leangrpo.pipeline.times import StageTimes
from megatron_leangrpo.pipeline.transport import StageTransport, TensorSpec
from megatron_leangrpo.reporting.quiet import quiet_libraries

STEPS = 10
EVEN, UNEVEN = (0.100, 0.100, 0.100, 0.100), (0.060, 0.100, 0.140, 0.080)
"""Seconds of the stages' forwards: long beside the millisecond in which a sleeper wakes up."""
BACKWARD = 2.0
"""Forwards that a backward takes."""
REPEATS = 2
"""The fastest one counts: a busy machine wakes sleepers late."""


class SleepingStage:
    """A stage's function and hooks, without a model."""

    def __init__(self, forward: float, backward: float) -> None:
        self.seconds = {"forward": forward, "backward": backward}
        self.slept = 0.0
        self.nothing = torch.zeros(64)

    def __call__(self, item, inputs):
        self._sleep("forward")
        return (inputs[0] * torch.ones(1, requires_grad=True),)

    def inputs(self, item, latents):
        return (self.nothing,)

    def drawn(self, item, velocity):
        return self.nothing

    def times(self, item) -> int:
        return 1

    def cotangent(self, item, time):
        return self.nothing

    def enter(self, item, time) -> None:
        self._sleep("backward")

    def done(self, item) -> None:
        """There is nothing to let go of."""

    def _sleep(self, kind: str) -> None:
        begin = time.perf_counter()
        time.sleep(self.seconds[kind])
        self.slept += time.perf_counter() - begin


def measure(
    transport: StageTransport, times: StageTimes, order: Sequence[Phase]
) -> tuple[float, float]:
    """Seconds of phases one after the other, and the share of them that stages did not sleep."""
    stage = SleepingStage(times.forward[transport.stage], times.backward[transport.stage])
    shapes = dict.fromkeys(
        ("receives", "sends", "latents"), lambda item: (TensorSpec.of(stage.nothing),)
    )
    driver = StageDriver(stage, transport, stage, **shapes)
    dist.barrier()
    begin = time.perf_counter()
    for phase in order:
        driver.run(phase)
        dist.barrier()
    seconds = time.perf_counter() - begin
    slept = torch.tensor(stage.slept)
    dist.all_reduce(slept)
    return seconds, 1 - slept.item() / (transport.stages * seconds)


def main() -> None:
    """Print the table as Markdown."""
    platform.initialize_distributed(pipeline_model_parallel_size=len(EVEN))
    transport = StageTransport(platform.pp_group(), timeout_seconds=60)
    stages, is_first = transport.stages, platform.rank() == 0
    if is_first:
        print(
            "| stages' forwards, M | order | seconds | simulated | off by | waiting | simulated |"
        )
        print("|---|---|---:|---:|---:|---:|---:|")
    for forward, flight in ((EVEN, 4), (EVEN, 2), (UNEVEN, 4)):
        times = StageTimes(forward, tuple(BACKWARD * f for f in forward))
        windows = same_windows(flight, range(STEPS - 1))
        for name, order in _orders(stages, windows):
            seconds, waiting = min(measure(transport, times, order) for _ in range(REPEATS))
            expected, idle = simulate_all(order, times)
            if is_first:
                own = "all 100 ms" if forward is EVEN else "60, 100, 140, 80 ms"
                print(
                    f"| {own}, {flight} | {name} | {seconds:.2f} | {expected:.2f} "
                    f"| {seconds / expected - 1:+.1%} | {waiting:.1%} | {idle:.1%} |",
                    flush=True,
                )
    dist.destroy_process_group()


def _orders(stages: int, windows: Windows) -> list[tuple[str, Sequence[Phase]]]:
    (one_step,) = phases("rollout", stages, 1, windows)
    return [
        ("rollout, step by step", [one_step] * STEPS),
        ("rollout, ring", phases("rollout", stages, STEPS, windows)),
        *((name, phases(name, stages, STEPS, windows)) for name in SCHEDULES if name != "rollout"),
    ]


if __name__ == "__main__":
    quiet_libraries()
    main()
