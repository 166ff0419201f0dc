# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""`leangrpo evaluate`: models side by side under the same prompts, noise and rewards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_leangrpo import platform
from megatron_leangrpo.files import atomic_write, slug
from megatron_leangrpo.grpo.candidates import Candidate
from megatron_leangrpo.grpo.evaluation import Evaluation
from megatron_leangrpo.grpo.experiment import Experiment
from megatron_leangrpo.grpo.intervals import Interval, mean_over_prompts
from megatron_leangrpo.grpo.reward_hacking import Measures, inspect, measure
from megatron_leangrpo.reporting.console import Console
from megatron_leangrpo.reporting.html_report import Picture, Table, write_report
from megatron_leangrpo.reporting.run_directory import RunDirectory
from megatron_leangrpo.reporting.sample_files import SampleFiles


@dataclass(frozen=True)
class Result:
    """What one model has got."""

    name: str
    evaluation: Evaluation
    measures: Measures
    findings: list[str]
    differences: dict[str, Interval]
    """From the first model by reward, paired by prompt and noise; empty for the first."""


def evaluate_models(
    experiment: Experiment, console: Console, candidates: Sequence[Candidate], json_path: str | None
) -> None:
    """Sample and score the base and each candidate, print a table and write a report."""
    results: list[Result] = []
    evaluator = experiment.evaluator()
    for note in experiment.encoder.notes([prompt.text for prompt, _ in evaluator.items]):
        console.warning(note)
    config = experiment.config
    start = "base" if config.model.weights is None and config.lora.path is None else "start"
    for candidate in (None, *candidates):
        name = start if candidate is None else candidate.name
        if candidate is not None:
            candidate.load(experiment)
        with console.progress(name, len(evaluator.items)) as advance:
            evaluation = evaluator.run(lambda n: advance(n * platform.dp_size()), inspect)
        results.append(_result(name, evaluation, results, experiment.scorer.weights))
    if not platform.is_logging_rank():
        return
    names = ["reward", *experiment.scorer.names]
    rows = [[r.name, *map(str, _scores(r).values())] for r in results]
    console.table(["model", *names], rows, title="mean reward ± 95 % interval over prompts")
    if len(results) > 1:
        rows = [[r.name, *map(str, r.differences.values())] for r in results[1:]]
        console.table(["model", *names], rows, title=f"difference from {start}, same noise")
    for result in results:
        for finding in result.findings:
            console.warning(f"{result.name}: {finding}")
    content = _to_json(experiment, results)
    with RunDirectory.create(config.output, f"{config.recipe}-evaluation") as directory:
        text = json.dumps(content, indent=2, allow_nan=False) + "\n"
        for path in (directory.path / "evaluation.json", *([json_path] if json_path else [])):
            atomic_write(path, text)
        files = SampleFiles(directory.samples, config.recipe, console.warning)
        for number, result in enumerate(results):
            title = f"{config.recipe}, {result.name}"
            files.grid(f"{number}-{slug(result.name)}", result.evaluation.samples, title)
        report = directory.path / "report.html"
        _write_report(report, experiment, results, candidates)
    console.line(f"report: {report}")


def _result(
    name: str, evaluation: Evaluation, before: Sequence[Result], weights: Sequence[float]
) -> Result:
    first = before[0].evaluation if before else evaluation
    measures, findings = measure(evaluation.inspected, first.inspected, evaluation.prompt_ids)
    differences = {}
    if before:
        change = evaluation.scores - first.scores
        total = change @ torch.tensor(weights).double()
        columns = zip(("reward", *evaluation.rewards), (total, *change.T))
        differences = {n: mean_over_prompts(column, first.prompt_ids) for n, column in columns}
    return Result(name, evaluation, measures, findings, differences)


def _scores(result: Result) -> dict[str, Interval]:
    return {"reward": result.evaluation.total, **result.evaluation.intervals}


def _checks(result: Result) -> dict[str, Interval | None]:
    measures = result.measures
    return {
        "grid_artefacts": measures.grid,
        "diversity": measures.diversity,
        "distance_to_base": measures.distance,
    }


def _to_json(experiment: Experiment, results: Sequence[Result]) -> dict[str, Any]:
    def intervals(found: dict[str, Interval | None]) -> dict[str, Any]:
        return {name: None if i is None else i.to_json() for name, i in found.items()}

    config = experiment.config
    return {
        "recipe": config.recipe,
        "prompts": config.prompts.evaluation or config.prompts.train,
        "samples_per_prompt": config.evaluation.samples_per_prompt,
        "num_steps": config.evaluation.num_steps,
        "seed": config.evaluation.seed,
        "interval": "95 %, Student's t over prompts",
        "models": {
            result.name: {
                "scores": intervals(_scores(result)),
                "correct": result.evaluation.correct,
                "differences": intervals(result.differences),
                "checks": intervals(_checks(result)),
                "findings": result.findings,
            }
            for result in results
        },
    }


def _write_report(
    path: Path, experiment: Experiment, results: Sequence[Result], candidates: Sequence[Candidate]
) -> None:
    config, first = experiment.config, results[0]
    names = list(_scores(first))
    tables = [
        Table(
            "Rewards",
            ["model", *names, experiment.scorer.verdict],
            [
                [r.name, *map(str, _scores(r).values()), _share(r.evaluation.correct)]
                for r in results
            ],
        )
    ]
    if results[1:]:
        rows = [[r.name, *map(str, r.differences.values())] for r in results[1:]]
        title = f"Difference from {first.name}, paired by prompt and noise"
        tables.append(Table(title, ["model", *names], rows))
    columns = [
        "model",
        "grid artefacts (log10)",
        "diversity in a group",
        f"distance to {first.name}",
    ]
    rows = [[r.name, *(str(i or "-") for i in _checks(r).values())] for r in results]
    tables.append(Table("What rewards do not see", columns, rows))
    judge = config.evaluation
    chosen = len(set(first.evaluation.prompt_ids))
    write_report(
        path,
        title=f"{config.recipe}: evaluation",
        facts=[
            f"{chosen} prompts of {config.prompts.evaluation or config.prompts.train} x "
            f"{judge.samples_per_prompt} samples, noise from seed {judge.seed}, {judge.num_steps} "
            "deterministic steps.",
            "± is the 95 % confidence interval by Student's t over prompts.",
        ],
        warnings=[f"{r.name}: {finding}" for r in results for finding in r.findings],
        tables=tables,
        curves=[run for run in dict.fromkeys(c.run for c in candidates) if run is not None],
        models=[result.name for result in results],
        rows=[
            (row[0].prompt, [Picture(s.image, s.reward, s.correct) for s in row])
            for row in zip(*(result.evaluation.samples for result in results))
        ],
    )


def _share(correct: float | None) -> str:
    return "-" if correct is None else f"{correct:.0%}"
