# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The commands that run a recipe, from their arguments to the closing line."""

import dataclasses
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

from megatron_leangrpo import platform
from megatron_leangrpo.config import RunConfig
from megatron_leangrpo.config_reader import read_config, read_recipe
from megatron_leangrpo.files import atomic_path, atomic_write
from megatron_leangrpo.grpo.config_checks import check_bounds
from megatron_leangrpo.reporting.console import Console
from megatron_leangrpo.reporting.rank_log import RankLog
from megatron_leangrpo.reporting.run_directory import RunDirectory
from megatron_leangrpo.reporting.sentences import byte_size, number

_EXTRA_MODULES = {"ocr": ("rapidocr", "onnxruntime"), "video": ("av",), "wandb": ("wandb",)}


def train(recipe: str, overrides: Sequence[str], dry_run: bool = False) -> None:
    """Run a recipe; with `dry_run` only check it and print what it would do."""
    from megatron_leangrpo.conditioning.cache import CachedEncoder
    from megatron_leangrpo.grpo.dry_run import check_and_describe
    from megatron_leangrpo.grpo.experiment import build_experiment
    from megatron_leangrpo.grpo.inputs import describe_prompts
    from megatron_leangrpo.grpo.precision_report import report_precision
    from megatron_leangrpo.grpo.run_report import RunReport
    from megatron_leangrpo.grpo.trainer import Trainer, check_resumable

    config, note = load(recipe, overrides)
    console = _start(config, note, alone=dry_run)
    resumes = _resumes(config)
    if platform.is_logging_rank():
        # Here already, because weights may take minutes to load.
        RunDirectory.check(config.output, resumes)
        if config.checkpoint.resume is True:
            check_resumable(RunDirectory(config.output))
    config = check_and_describe(config, console, None if dry_run else platform.world_size())
    if dry_run:
        return
    with console.progress("loading", 1) as advance:
        experiment = build_experiment(config)
        advance(1)
    experiment.scorer.warn = console.warning
    if isinstance(experiment.encoder, CachedEncoder):
        console.line(experiment.encoder.summary)
    if platform.is_logging_rank():
        texts = [p.text for p in (*experiment.prompts, *experiment.evaluation_prompts)]
        for note in (*describe_prompts(config), *experiment.encoder.notes(texts)):
            console.warning(note)
    directory = _run_directory(config, resumes)
    report = RunReport(config, directory, console, platform.is_logging_rank())
    report.verdict = experiment.scorer.verdict
    with RankLog(directory.logs, platform.rank()) as log:
        console.record_to(log.write)
        trainer = Trainer(experiment, report)
        if resumes:
            trainer.resume()
        if trainer.done < config.grpo.iterations:
            report_precision(experiment, console)
        trainer.run()
        console.record_to(None)
    directory.close()
    platform.destroy_distributed()


def compare(
    recipe: str,
    overrides: Sequence[str],
    schedules: Sequence[str],
    repeat: int,
    json_path: str | None = None,
    gradients_path: str | None = None,
) -> None:
    """Run one rollout under each schedule and print gradient error, time and memory."""
    from megatron_leangrpo.grpo.compare import check_comparison, compare_schedules
    from megatron_leangrpo.grpo.dry_run import check_run
    from megatron_leangrpo.grpo.experiment import build_experiment, check_schedule
    from megatron_leangrpo.grpo.planning import resolve_auto

    check_comparison(schedules, repeat)
    _check_file("--json", json_path)
    _check_file("--dump-grads", gradients_path)
    config, note = load(recipe, overrides)
    for name in schedules:
        check_schedule(name, config.grpo)
    console = _start(config, note)
    check_run(config, platform.world_size())
    config, _ = resolve_auto(config, platform.world_size())
    experiment = build_experiment(config)
    with console.progress("comparing", len(schedules) * (repeat + 1)) as advance:
        comparison = compare_schedules(experiment, schedules, repeat, advance)
    first = comparison.reports[comparison.baseline]
    console.table(
        ["schedule", "rel. error", "cosine", "rollout s", "reward s", "update s", "total s",
         "speed", "peak activations", "gradient buffers"],
        [
            [
                name,
                f"{report.rel_error:.2e}",
                f"{report.cosine:.8f}",
                number(report.time_rollout),
                number(report.time_reward),
                number(report.time_update),
                number(report.time_total),
                f"{first.time_total / report.time_total:.2f}x",
                byte_size(report.peak_activation_bytes),
                byte_size(report.gradient_buffer_bytes + report.moment_buffer_bytes),
            ]
            for name, report in comparison.reports.items()
        ],
        title=f"{config.recipe}: gradient against {comparison.baseline}, "
        f"{_count(repeat, 'interleaved run')} on {_count(platform.world_size(), 'rank')}",
    )  # fmt: skip
    if platform.is_logging_rank():
        if json_path:
            settings = {**dataclasses.asdict(config), "world_size": platform.world_size()}
            report = comparison.to_json(settings)
            atomic_write(json_path, json.dumps(report, indent=2) + "\n")
        if gradients_path:
            from safetensors.torch import save_file

            with atomic_path(gradients_path) as temporary:
                save_file(comparison.gradients, temporary)
    platform.destroy_distributed()


def plan(
    recipe: str,
    overrides: Sequence[str],
    gpu: str,
    gpus: int | None,
    json_path: str | None = None,
    timeline_path: str | None = None,
) -> None:
    """Print what each schedule would take on each layout of some GPUs, and which to choose."""
    from megatron_leangrpo.grpo.plan import plan as plan_run

    _check_file("--json", json_path)
    _check_file("--timeline", timeline_path)
    config, _ = load(recipe, overrides)
    plan_run(config, gpu, gpus, json_path, timeline_path)


def sample(recipe: str, overrides: Sequence[str], checkpoint: str | None = None) -> None:
    """Draw pictures of the evaluation prompts from the base or from a run's checkpoint."""
    from megatron_leangrpo.grpo.experiment import build_experiment
    from megatron_leangrpo.grpo.sampling import find_checkpoint, sample_pictures

    config, note = load(recipe, overrides)
    folder = None if checkpoint is None else find_checkpoint(Path(checkpoint))
    console = _start(config, note)
    if platform.is_logging_rank():
        RunDirectory.check(config.output, resume=False)
    experiment = build_experiment(config)
    experiment.scorer.warn = console.warning
    sample_pictures(experiment, console, folder)
    platform.destroy_distributed()


def evaluate(
    recipe: str,
    overrides: Sequence[str],
    checkpoints: Sequence[str],
    json_path: str | None = None,
) -> None:
    """Score the base and checkpoints side by side, with intervals and a report in HTML."""
    from megatron_leangrpo.grpo.candidates import find_candidates
    from megatron_leangrpo.grpo.evaluate import evaluate_models
    from megatron_leangrpo.grpo.experiment import build_experiment

    _check_file("--json", json_path)
    config, note = load(recipe, overrides)
    candidates = find_candidates(checkpoints)
    console = _start(config, note)
    if platform.is_logging_rank():
        RunDirectory.check(config.output, resume=False)
    experiment = build_experiment(config)
    experiment.scorer.warn = console.warning
    evaluate_models(experiment, console, candidates, json_path)
    platform.destroy_distributed()


def load(recipe: str, overrides: Sequence[str]) -> tuple[RunConfig, str | None]:
    """Resolve and check a recipe, or the one it names for machines without an optional extra."""
    chosen = read_recipe(recipe)
    note = None
    if chosen.requires and not _has_extra(chosen.requires):
        if chosen.otherwise is None:
            raise ValueError(f"recipe {recipe} needs {_install_line(chosen.requires)}")
        note = (
            f"recipe {chosen.name} needs {_install_line(chosen.requires)}; "
            f"running {chosen.otherwise} instead"
        )
        chosen = read_recipe(chosen.otherwise)
    config = read_config(chosen, list(overrides))
    check_bounds(config)
    return config, note


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _check_file(option: str, path: str | None) -> None:
    """Raise ``ValueError`` for a file that could not be written in the end."""
    if path is None:
        return
    if Path(path).is_dir():
        raise ValueError(f"{option} = {path!r} is a directory; give the path of a file")
    if not Path(path).absolute().parent.is_dir():
        raise ValueError(f"{option} = {path!r}: its directory does not exist; make it first")


def _has_extra(extra: str) -> bool:
    return all(importlib.util.find_spec(name) for name in _EXTRA_MODULES[extra])


def _install_line(extra: str) -> str:
    return f"the extra [{extra}] (pip install 'megatron-leangrpo[{extra}]')"


def _start(config: RunConfig, note: str | None, alone: bool = False) -> Console:
    """Join the other ranks, unless `alone`, and return this rank's console."""
    parallel = config.parallel
    if not alone:
        platform.initialize_distributed(
            parallel.tensor_model_parallel_size,
            timeout_seconds=parallel.timeout_seconds,
            context_parallel_size=parallel.context_parallel_size,
            pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        )
    console = Console(enabled=platform.is_logging_rank())
    if note:
        console.warning(note)
    return console


def _resumes(config: RunConfig) -> bool:
    """Whether the run continues one: with auto, where its directory holds one already."""
    if config.checkpoint.resume != "auto":
        return config.checkpoint.resume
    if config.output is None:
        raise ValueError("checkpoint.resume = auto needs output: the run directory to continue")
    # The file is written after the ranks have met several times, so that all see the same here.
    return RunDirectory(config.output).config.is_file()


def _run_directory(config: RunConfig, resumes: bool) -> RunDirectory:
    """Make or open the run directory on the logging rank and tell the others where it is."""
    directory = None
    if platform.is_logging_rank():
        directory = (
            RunDirectory.resume(config.output)
            if resumes
            else RunDirectory.create(config.output, config.recipe)
        )
    # Every rank takes part in the broadcast, the one that knows the answer too.
    path = platform.text_from_first_rank(lambda: str(directory.path.resolve()))
    return directory or RunDirectory(path)
