# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Measures the peaks that the memory model predicts; run it for the table of docs/planner.md."""

import dataclasses
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_leangrpo import platform
from megatron_leangrpo.config import RunConfig
from megatron_leangrpo.grpo.experiment import Experiment
from megatron_leangrpo.grpo.iteration import IterationRunner
from megatron_leangrpo.grpo.memory import peak_allocated_bytes
from megatron_leangrpo.grpo.planning import batches_of, workload_of
from megatron_leangrpo.models.flux.config import PRESETS, FluxConfig, flux_bench
from megatron_leangrpo.models.wan.config import PRESETS as WAN_PRESETS
from megatron_leangrpo.models.wan.config import WanConfig, wan_tiny
from megatron_leangrpo.planner.memory import peak_activations
from megatron_leangrpo.planner.pipelining import stage_memories
from megatron_leangrpo.planner.selector import SCHEDULES
from megatron_leangrpo.planner.workload import Ranks, Workload
from tests.grpo import tiny

REWARD = "tests.planner.light:LightReward"
WIDE, NARROW, VIDEO = "flux_planned_wide", "flux_planned_narrow", "wan_planned"
STAGES, VIDEO_STAGES = "flux_planned_stages", "wan_planned_stages"


def _narrow(**overrides: Any) -> FluxConfig:
    small = {"num_double_blocks": 1, "num_single_blocks": 2, "hidden_size": 128}
    inputs = {"joint_attention_dim": 64, "pooled_projection_dim": 64, "in_channels": 16}
    return flux_bench(
        **{**small, **inputs, "out_channels": 16, "axes_dims_rope": (8, 12, 12), **overrides}
    )


def _wide(**overrides: Any) -> FluxConfig:
    return flux_bench(**{"num_double_blocks": 2, "num_single_blocks": 1, **overrides})


def _video(**overrides: Any) -> WanConfig:
    """Wide enough for the transformer to take more than its decoded videos."""
    return wan_tiny(**{"hidden_size": 192, "ffn_hidden_size": 512, **overrides})


PRESETS.update({NARROW: _narrow, WIDE: _wide})
PRESETS[STAGES] = lambda **o: _narrow(**{"num_double_blocks": 3, "num_single_blocks": 5, **o})
WAN_PRESETS[VIDEO] = _video
WAN_PRESETS[VIDEO_STAGES] = lambda **o: _video(**{"num_layers": 4, **o})


ALONE = Ranks()


@dataclass(frozen=True)
class Case:
    """One shape of a run."""

    preset: str = NARROW
    frames: int = 1
    size: int = 128
    text: int = 16
    micro_batch: int = 1
    recompute: str = "none"
    dtype: str = "float32"
    kl_beta: float = 0.0
    advantage: str = "flow_grpo_group_std"
    ranks: Ranks = ALONE
    prompts: int = 1
    lora: int = 0
    """Rank of the adapters; 0 trains all weights."""
    steps: int = 5
    """All but the last one are trained."""


CASES = {
    "one sample at a time": Case(),
    "batches of 2, odd token counts": Case(size=144, text=7, micro_batch=2),
    "wide, attention recomputed": Case(WIDE, recompute="selective"),
    "blocks recomputed": Case(size=144, recompute="full"),
    "bfloat16": Case(size=144, dtype="bfloat16"),
    "video": Case(VIDEO, frames=9, size=96),
    "KL, std of all groups": Case(
        text=31, kl_beta=0.01, advantage="flow_grpo_global_std", prompts=2, steps=4
    ),
}


@dataclass(frozen=True)
class Peak:
    """Measured and predicted bytes of one iteration, and copies of the gradient buffers."""

    measured: int
    predicted: int
    copies: float
    predicted_copies: int

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.measured - 1


def _config(case: Case, prompts: str) -> RunConfig:
    return tiny.tiny_config(
        prompts,
        model={
            "family": "wan" if case.preset in WAN_PRESETS else "flux",
            "preset": case.preset,
            "max_text_tokens": case.text,
            "recompute_granularity": case.recompute,
            "dtype": case.dtype,
        },
        parallel={
            "tensor_model_parallel_size": case.ranks.tensor,
            "context_parallel_size": case.ranks.context,
            "pipeline_model_parallel_size": case.ranks.pipeline,
        },
        lora={"rank": case.lora},
        # Of five steps jagg makes a window of three and a step by itself.
        sampling={
            "height": case.size,
            "width": case.size,
            "num_frames": case.frames,
            "num_steps": case.steps,
        },
        grpo={
            "prompts_per_iteration": case.prompts,
            # A wave for each stage.
            "group_size": max(2, case.ranks.pipeline),
            "micro_batch_size": case.micro_batch,
            "kl_beta": case.kl_beta,
            "advantage": case.advantage,
            "jagg_frac": 1.0,
        },
        reward={"weights": {REWARD: 1.0}},
    )


def start(case: Case, prompts: str) -> tuple[Experiment, Workload]:
    """Build a case and what the planner knows of it."""
    config = _config(case, prompts)
    experiment = tiny.start(config)
    single = dataclasses.replace(config, parallel=RunConfig().parallel)
    return experiment, workload_of(single, experiment.architecture)


def _iterations(
    experiment: Experiment, schedules: Sequence[str]
) -> Iterator[tuple[str, IterationRunner, int]]:
    """The peak of an iteration under each schedule."""
    warm = False
    for name in sorted(schedules, key=lambda schedule: schedule != "reweight"):
        runner = experiment.runner(name)

        def run(runner: IterationRunner = runner) -> None:
            runner.run(0, experiment.sampler.batch(0))

        # Caches fill once; reweight's buffers stay from its first iteration on, jagg's is exact.
        if not warm or name in ("reweight", "jagg"):
            run()
        warm = True
        yield name, runner, peak_allocated_bytes(run)


def measure(case: Case, prompts: str, schedules: Sequence[str] = SCHEDULES) -> dict[str, Peak]:
    """Run an iteration under every schedule that takes the case."""
    experiment, work = start(case, prompts)
    batch = batches_of(experiment.config)(case.ranks)
    if case.micro_batch > 1:
        schedules = [name for name in schedules if name != "reweight"]
    peaks = {}
    for name, runner, measured in _iterations(experiment, schedules):
        predicted = peak_activations(
            work, batch, name, case.recompute, case.ranks, approximated=True
        )
        buffers = runner.schedule.buffers
        copies = buffers.copies_num_bytes / buffers.num_bytes
        needed = batch.moment_copies if name == "reweight" else 0
        peaks[name] = Peak(measured, predicted, copies, needed)
    return peaks


def measure_stage(case: Case, prompts: str, schedules: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Measured and predicted peak of this pipeline stage under every schedule."""
    experiment, work = start(case, prompts)
    batch = batches_of(experiment.config)(case.ranks)
    peaks = {}
    for name, _, measured in _iterations(experiment, schedules):
        stages = stage_memories(work, batch, name, case.recompute, case.ranks)
        stage = stages[platform.pp_rank()]
        peaks[name] = measured, stage.activations + stage.messages
    return peaks


def main() -> None:
    """Print the table as Markdown."""
    prompts = tiny.write_prompts(Path(tempfile.mkdtemp()))
    print("| shape | " + " | ".join(SCHEDULES) + " |")
    print("|---|" + "---:|" * 4)
    for name, case in CASES.items():
        peaks = measure(case, prompts)
        cells = [
            f"{peaks[s].measured / 2**20:.1f} MiB, {100 * peaks[s].error:+.1f} %"
            if s in peaks
            else "needs micro-batch 1"
            for s in SCHEDULES
        ]
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    sys.exit(main())
