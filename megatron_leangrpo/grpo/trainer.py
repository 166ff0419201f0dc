# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The training run: iterations, evaluations, checkpoints, pictures and the closing line."""

import contextlib
import os
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_leangrpo import platform
from megatron_leangrpo.checkpoint.saving import CheckpointSaver
from megatron_leangrpo.checkpoint.store import checkpoints
from megatron_leangrpo.checkpoint.training import TrainingState, find_newest, load_checkpoint
from megatron_leangrpo.grpo.ema import WeightAverage
from megatron_leangrpo.grpo.evaluation import Evaluation
from megatron_leangrpo.grpo.experiment import Experiment
from megatron_leangrpo.grpo.exporting import can_export, export_checkpoint, transformer_config
from megatron_leangrpo.grpo.iteration import IterationResult
from megatron_leangrpo.grpo.model_card import model_card
from megatron_leangrpo.grpo.optimization import build_optimization
from megatron_leangrpo.grpo.placement import Wave
from megatron_leangrpo.grpo.rollback import Rollback
from megatron_leangrpo.grpo.run_report import RunReport
from megatron_leangrpo.grpo.throughput import throughput_of
from megatron_leangrpo.operations.alarms import Alarms
from megatron_leangrpo.operations.finite import check_gradients
from megatron_leangrpo.operations.stop import StopRequested, StopSignal
from megatron_leangrpo.operations.watchdog import Watchdog
from megatron_leangrpo.overlap.choice import choices
from megatron_leangrpo.overlap.commands import print_choices
from megatron_leangrpo.reporting.memory import peak_memory_bytes
from megatron_leangrpo.reporting.run_directory import RunDirectory


def check_resumable(directory: RunDirectory) -> None:
    """Raise ``ValueError`` where a run has no checkpoint at all; reads none."""
    if not checkpoints(directory.checkpoints):
        raise ValueError(
            f"checkpoint.resume: {directory.path} holds no checkpoint; start the run again in "
            "another directory, or with checkpoint.resume=auto in this one"
        )


class Trainer:
    """Runs the iterations of an experiment from its start or from a checkpoint."""

    def __init__(self, experiment: Experiment, report: RunReport) -> None:
        config = experiment.config
        self.experiment, self.report, self.config = experiment, report, config
        self.runner = experiment.runner(config.grpo.schedule)
        self.evaluator = experiment.evaluator()
        total_updates = config.grpo.iterations * config.grpo.updates_per_rollout
        self.optimization = build_optimization(experiment.model, config.optimizer, total_updates)
        self.average = None
        if config.optimizer.ema_decay > 0:
            self.average = WeightAverage(
                experiment.policy.model, config.optimizer.ema_decay, config.optimizer.ema_interval
            )
        self.saver = CheckpointSaver(report.directory.checkpoints, config.checkpoint.keep)
        self._can_export = can_export(experiment.architecture)
        self.throughput = throughput_of(config, experiment.architecture)
        self.stop, self.alarms = StopSignal(), Alarms()
        self.rollback = Rollback(config.operations, self.saver, report.console)
        self.watchdog = Watchdog(
            report.directory.path / "heartbeats",
            platform.rank(),
            platform.world_size(),
            # Before the others give the late rank up.
            0.8 * platform.timeout_seconds(),
            report.console.warning,
        )
        self.first_iteration = self.done = 0

    @property
    def state(self) -> TrainingState:
        """What a checkpoint holds."""
        return TrainingState(
            self.experiment.policy.model,
            self.optimization.optimizer,
            self.optimization.scheduler,
            None if self.average is None else self.average.values,
            self.runner.router.state(),
            transformer_config(self.experiment.architecture),
            self.rollback.taken,
        )

    def resume(self) -> None:
        """Continue from the newest whole checkpoint of the run directory (a collective).

        A run that was ended before its first checkpoint starts again; ``ValueError`` where there
        are checkpoints and none is whole.
        """
        console, directory = self.report.console, self.report.directory
        found = find_newest(directory.checkpoints)
        for reason in found.skipped:
            console.warning(f"passed over checkpoint {reason}")
        if found.checkpoint is None:
            if found.skipped:
                raise ValueError(
                    f"checkpoint.resume: no checkpoint of {directory.path} is whole "
                    f"({'; '.join(found.skipped[:3])})"
                )
            console.line(f"{directory.path} has no checkpoint yet: starting at iteration 1")
            return
        state = self.state
        self.first_iteration = self.done = load_checkpoint(found.checkpoint, state)
        self.runner.router.load_state(state.window_scores)
        self.rollback.resume(state.rollbacks, state.optimizer)
        rows = [row for row in directory.metrics_rows() if row["iteration"] <= self.done]
        self.alarms = Alarms.after(rows, state.rollbacks)
        text = f"resumed after iteration {self.done}: {found.checkpoint}"
        console.line(text)
        console.record("resumed", text, iteration=self.done)
        if self._exports_after(self.done) and platform.is_logging_rank():
            self._export_again(found.checkpoint)

    def _export_again(self, checkpoint: Path) -> None:
        """Export a checkpoint whose export was cut off with the run."""
        if not self._export_folder(self.done).exists():
            self.report.read_evaluations(self.done)
            self._export(self.done)(checkpoint)

    def run(self) -> dict[str, Any]:
        """Train to the last iteration; returns the summary. A finished run is left as it is."""
        start, iterations = time.perf_counter(), self.config.grpo.iterations
        if self.first_iteration >= iterations:
            self.report.console.line(
                f"this run has finished its {iterations} iterations; raise grpo.iterations to go on"
            )
            return {}
        self.stop.install()
        self.report.start(self.first_iteration)
        self._record_start()
        if self.first_iteration == 0:
            self.report.evaluation(0, self._evaluate())
        try:
            with self.watchdog, self.report.console.progress("training", iterations) as advance:
                advance(self.first_iteration)
                for iteration in range(self.first_iteration, iterations):
                    self.stop.check()
                    self._run_iteration(iteration)
                    advance(1)
        except StopRequested:
            self._save_before_stopping()
            return {}
        except BaseException as error:
            self.report.console.record("error", repr(error), traceback=traceback.format_exc())
            self.saver.wait()
            raise
        self.saver.finish()
        return self.report.finish(seconds=time.perf_counter() - start)

    def _record_start(self) -> None:
        self.report.console.record(
            "start",
            iteration=self.first_iteration,
            pid=os.getpid(),
            device=str(platform.device()),
            world_size=platform.world_size(),
            **{f"{name}_rank": getattr(platform, f"{name}_rank")() for name in ("dp", "tp", "pp")},
        )

    def _save_before_stopping(self) -> None:
        """Save the last whole iteration, unless that has been begun, and say what follows."""
        done, interval = self.done, self.config.checkpoint.interval
        if interval >= 0 and done > self.first_iteration and not self._saves_after(done):
            self.saver.start(self.state, done)
        self.saver.finish()
        follows = (
            "nothing was saved (checkpoint.interval = -1)"
            if interval < 0
            else f"--checkpoint.resume=auto --output={self.report.directory.path} continues"
        )
        text = f"stopped by SIGTERM after iteration {done}; {follows}"
        self.report.console.line(text)
        self.report.console.record("stopped", text)

    def _run_iteration(self, iteration: int) -> None:
        metrics = self._train(iteration)
        done = self.done = iteration + 1
        self.watchdog.beat(f"iteration {done}, after its update")
        evaluation = self._evaluate() if self._evaluates_after(done) else None
        self.report.iteration(done, metrics, evaluation)
        went_back = self._react(metrics)
        if iteration == self.first_iteration and self.config.overlap.mode == "auto":
            print_choices(self.report.console, choices())
        self.saver.poll()
        if self._saves_after(done):
            # After a rollback the weights are no longer those that were evaluated.
            is_evaluated = evaluation is not None and not went_back
            reward = evaluation.reward_mean if is_evaluated else None
            exports = self._exports_after(done)
            self.saver.start(self.state, done, reward, self._export(done) if exports else None)

    def _react(self, metrics: Mapping[str, Any]) -> bool:
        """Raise alarms, and go back where they say so and the run may; returns whether it did."""
        # The first rank knows the iterations before a resume.
        alarms = self.alarms.check(metrics) if platform.is_logging_rank() else {}
        for text in alarms.values():
            self.report.console.warning(f"iteration {self.done}: {text}")
        if not self.rollback.is_due(alarms):
            return False
        state = self.state
        if not self.rollback.go_back(state, self.done):
            return False
        self.runner.router.load_state(state.window_scores)
        self.alarms = Alarms()
        return True

    def _train(self, iteration: int) -> dict[str, Any]:
        prompts = self.experiment.sampler.batch(iteration)
        waves = self.runner.count_waves(len(prompts))
        with self.report.console.progress(f"iteration {iteration + 1}", waves) as advance:

            def after_wave(wave: Wave) -> None:
                advance(1)
                self.watchdog.beat(f"iteration {iteration + 1}, after wave {wave.index + 1}")
                # The weights are still those of the last iteration: its rollout can be given up.
                self.stop.check()

            self.runner.on_wave = after_wave
            result = self.runner.run(iteration, prompts, self._apply_update)
        return self._metrics(result)

    def _apply_update(self) -> dict[str, float]:
        """Take one optimizer step on the reduced gradient."""
        update = self.optimization.updates
        check_gradients(self.experiment.policy.model, self.done + 1)
        metrics = self.optimization.step()
        if self.average is not None:
            self.average.update(self.experiment.policy.model, update)
        return metrics

    def _metrics(self, result: IterationResult) -> dict[str, Any]:
        metrics: dict[str, Any] = dict(result.metrics)
        metrics |= self.throughput.metrics(metrics["time_total"])
        if self.rollback.is_possible:
            metrics["rollbacks"] = self.rollback.taken
        metrics["peak_memory_bytes"] = peak_memory_bytes()
        metrics["schedule"] = self.config.grpo.schedule
        for number, update in enumerate(result.updates[1:], start=2):
            for name in ("ratio_min", "ratio_max", "clip_fraction", "grad_norm", "learning_rate"):
                metrics[f"update_{number}/{name}"] = update.get(name)
        return metrics

    def _evaluate(self) -> Evaluation:
        images = len(self.evaluator.items) // platform.dp_size()
        weights = contextlib.nullcontext()
        if self.average is not None:
            weights = self.average.applied(self.experiment.policy.model)
        with weights, self.report.console.progress("evaluation", images) as advance:
            return self.evaluator.run(advance)

    def _evaluates_after(self, done: int) -> bool:
        return self._is_due(done, self.config.evaluation.interval)

    def _saves_after(self, done: int) -> bool:
        interval = self.config.checkpoint.interval
        if interval < 0:
            return False
        return self._is_due(done, interval) or self._exports_after(done)

    def _exports_after(self, done: int) -> bool:
        interval = self.config.checkpoint.export_interval
        return interval >= 0 and self._is_due(done, interval) and self._can_export

    def _is_due(self, done: int, interval: int) -> bool:
        return done == self.config.grpo.iterations or (interval > 0 and done % interval == 0)

    def _export_folder(self, done: int) -> Path:
        return self.report.directory.export / f"step_{done:06d}"

    def _export(self, done: int) -> Callable[[Path], None]:
        """What the saver calls with the checkpoint after that many iterations."""
        architecture = self.experiment.architecture
        is_adapted = architecture.adaptation is not None
        card = model_card(
            self.config,
            architecture,
            done,
            platform.world_size(),
            self.report.evaluations,
            adapter=is_adapted,
        )
        folder = self._export_folder(done)
        average = self.average is not None
        rules = architecture.adapter_rules() if is_adapted else None
        return lambda checkpoint: export_checkpoint(
            checkpoint, folder, architecture, rules, average, card
        )
