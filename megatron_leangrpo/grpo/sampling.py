# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Samples of the evaluation prompts from the base model or from a checkpoint of a run."""

from pathlib import Path

from megatron_leangrpo import platform
from megatron_leangrpo.checkpoint.store import newest_valid, read_manifest
from megatron_leangrpo.checkpoint.training import load_weights
from megatron_leangrpo.grpo.experiment import Experiment
from megatron_leangrpo.reporting.console import Console
from megatron_leangrpo.reporting.run_directory import RunDirectory
from megatron_leangrpo.reporting.sample_files import SampleFiles
from megatron_leangrpo.reporting.sentences import evaluation_line


def sample_pictures(experiment: Experiment, console: Console, checkpoint: Path | None) -> None:
    """Sample, score and save `evaluation.grid_images` pictures or videos and a grid of them."""
    config, iteration = experiment.config, 0
    if checkpoint is not None:
        iteration = read_manifest(checkpoint).iteration
        load_weights(checkpoint, experiment.policy.model, average=config.optimizer.ema_decay > 0)
        console.line(f"weights of {checkpoint}")
    evaluator = experiment.evaluator()
    evaluator.items = evaluator.items[: config.evaluation.grid_images]
    for note in experiment.encoder.notes([prompt.text for prompt, _ in evaluator.items]):
        console.warning(note)
    with console.progress("sampling", len(evaluator.items)) as advance:
        evaluation = evaluator.run(lambda count: advance(count * platform.dp_size()))
    console.line(
        evaluation_line(
            iteration, evaluation.reward_mean, evaluation.correct, experiment.scorer.verdict
        )
    )
    if not platform.is_logging_rank():
        return
    with RunDirectory.create(config.output, f"{config.recipe}-samples") as directory:
        files = SampleFiles(directory.samples, config.recipe, console.warning)
        for (prompt, number), sample in zip(evaluator.items, evaluation.samples):
            files.single(prompt.id, number, sample)
        title = f"{config.recipe}, iteration {iteration}"
        grid = files.grid("grid", evaluation.samples, title)
    console.line(f"{len(evaluation.samples)} samples in {directory.samples}, all in {grid}")


def find_checkpoint(path: Path) -> Path:
    """Return a checkpoint folder from itself, or the newest whole one of a run directory.

    ``ValueError`` where there is none.
    """
    for folder in (path / "checkpoints", path):
        newest = newest_valid(folder).checkpoint
        if newest is not None:
            return newest
    read_manifest(path)
    return path
