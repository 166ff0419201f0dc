# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What a training run shows and leaves behind: lines, metrics, pictures, curves, the summary."""

import dataclasses
import json
import math
from statistics import median
from typing import Any

from megatron_leangrpo.config import RunConfig
from megatron_leangrpo.config_reader import write_config
from megatron_leangrpo.grpo.evaluation import Evaluation
from megatron_leangrpo.reporting.console import Console
from megatron_leangrpo.reporting.curves import save_curves
from megatron_leangrpo.reporting.metrics import MetricsWriter
from megatron_leangrpo.reporting.run_directory import RunDirectory
from megatron_leangrpo.reporting.sample_files import SampleFiles
from megatron_leangrpo.reporting.sentences import evaluation_line, final_line, iteration_line

_RATES = ("samples_per_second", "tokens_per_second", "tflops_per_rank", "mfu")


class RunReport:
    """Writes the run directory on the logging rank; on the others every call does nothing."""

    def __init__(
        self, config: RunConfig, directory: RunDirectory, console: Console, writes: bool
    ) -> None:
        self.config, self.directory, self.console, self.writes = config, directory, console, writes
        self.samples = SampleFiles(directory.samples, config.recipe, console.warning)
        self.verdict = "correct"
        self.metrics: MetricsWriter | None = None
        self.evaluations: dict[int, dict[str, Any]] = {}

    def start(self, completed_iterations: int) -> None:
        """Open the files; a resumed run takes the evaluations so far from its summary."""
        if not self.writes:
            return
        self.directory.write_config(write_config(self.config))
        self.read_evaluations(completed_iterations)
        wandb_config = dataclasses.asdict(self.config) if self.config.wandb else None
        self.metrics = MetricsWriter(self.directory, completed_iterations, wandb_config)

    def read_evaluations(self, completed_iterations: int) -> None:
        """Take the evaluations of a run's finished iterations from its summary."""
        if completed_iterations and self.directory.summary.exists():
            earlier = json.loads(self.directory.summary.read_text(encoding="utf-8"))
            for row in earlier.get("evaluations", []):
                if row["iteration"] <= completed_iterations:
                    self.evaluations[row["iteration"]] = row

    def evaluation(self, iteration: int, evaluation: Evaluation) -> dict[str, float]:
        """Report an evaluation after `iteration` iterations; returns its metrics."""
        row: dict[str, Any] = {
            "iteration": iteration,
            "reward": _number_or_none(evaluation.reward_mean),
            "correct": evaluation.correct,
            "half_width": evaluation.total.half_width,
            "rewards": {n: _number_or_none(value) for n, value in evaluation.rewards.items()},
            "half_widths": {n: i.half_width for n, i in evaluation.intervals.items()},
        }
        self.evaluations[iteration] = row
        self.console.line(
            evaluation_line(iteration, evaluation.reward_mean, evaluation.correct, self.verdict)
        )
        metrics = {"eval_reward": evaluation.reward_mean}
        metrics |= {f"eval_reward_{name}": value for name, value in evaluation.rewards.items()}
        if evaluation.correct is not None:
            metrics["eval_correct"] = evaluation.correct
        if self.writes:
            self.samples.evaluation(iteration, self.config.grpo.iterations, evaluation.samples)
            if iteration == 0:
                self.metrics.write_scalars(0, metrics)
            self.directory.write_summary(self._summary())
        return metrics

    def iteration(
        self, iteration: int, metrics: dict[str, Any], evaluation: Evaluation | None
    ) -> None:
        """Report a finished iteration and the evaluation after it, if there was one."""
        self.console.line(iteration_line(iteration, self.config.grpo.iterations, metrics))
        own = {name: value for name, value in metrics.items() if name.startswith("time_")}
        self.console.record("iteration", iteration=iteration, **own)
        if evaluation is not None:
            metrics |= self.evaluation(iteration, evaluation)
        if self.writes:
            self.metrics.write(iteration, metrics)
            if evaluation is not None:
                self._draw_curves()

    def finish(self, seconds: float) -> dict[str, Any]:
        """Write the summary, print the closing line and return the summary."""
        summary = {**self._summary(), "seconds": seconds}
        self.console.record("finished", seconds=seconds)
        if self.writes:
            summary["throughput"] = self._throughput()
            self.directory.write_summary(summary)
            self.metrics.close()
        if None not in (summary["eval_reward_before"], summary["eval_reward_after"]):
            self.console.line(final_line(summary, str(self.directory.samples)))
        return summary

    def _summary(self) -> dict[str, Any]:
        rows = [self.evaluations[n] for n in sorted(self.evaluations)]
        first, last = rows[0], rows[-1]
        return {
            "recipe": self.config.recipe,
            "schedule": self.config.grpo.schedule,
            "seed": self.config.seed,
            "iterations": last["iteration"],
            "eval_reward_before": first["reward"] if first["iteration"] == 0 else None,
            "eval_reward_after": last["reward"],
            "eval_correct_before": first["correct"],
            "eval_correct_after": last["correct"],
            "correct_means": self.verdict,
            "evaluations": rows,
        }

    def _throughput(self) -> dict[str, float | None]:
        """Medians over the iterations; MFU is null where the device's peak is not known."""
        rows = self.directory.metrics_rows()
        found = {name: [row[name] for row in rows if row.get(name) is not None] for name in _RATES}
        return {name: median(values) if values else None for name, values in found.items()}

    def _draw_curves(self) -> None:
        rewards = {
            n: row["reward"] for n, row in self.evaluations.items() if row["reward"] is not None
        }
        title = f"{self.config.recipe}, schedule {self.config.grpo.schedule}"
        save_curves(self.directory.curves, self.directory.metrics_rows(), rewards, title)


def _number_or_none(value: float) -> float | None:
    """JSON has no NaN: the mean over no sample, when the reward failed for all, is null."""
    return value if math.isfinite(value) else None
