# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The model card of an export: what it is, how it was made, how it scores, how it is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from megatron_leangrpo.config import RunConfig
from megatron_leangrpo.grpo.architecture import Architecture


def model_card(
    config: RunConfig,
    architecture: Architecture,
    iteration: int,
    world_size: int,
    evaluations: Mapping[int, Mapping[str, Any]],
    adapter: bool = False,
) -> str:
    """A README.md with Hugging Face's front matter; `evaluations` are the rows of the summary."""
    base = _base_model(architecture, config)
    video = config.model.family == "wan"
    front = {
        "base_model": base,
        "base_model_relation": "adapter" if adapter else "finetune",
        "library_name": "diffusers",
        "pipeline_tag": "text-to-video" if video else "text-to-image",
        "tags": ["grpo", "megatron_leangrpo", config.model.family, *(["lora"] if adapter else [])],
    }
    weights = "the average of the weights" if config.optimizer.ema_decay > 0 else "the weights"
    what = "low-rank adapters" if adapter else weights
    return "\n".join(
        [
            "---",
            yaml.safe_dump(front, sort_keys=False).strip(),
            "---",
            "",
            f"# {config.recipe}, iteration {iteration}",
            "",
            f"GRPO post-training of {base} by megatron_leangrpo; this is {what} after {iteration} "
            f"of {config.grpo.iterations} iterations.",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in _facts(config, world_size).items()),
            "",
            "## Evaluation",
            "",
            *_evaluation_table(config, iteration, evaluations),
            "",
            "## Use",
            "",
            "```python",
            *_usage(architecture, config, adapter),
            "```",
            "",
        ]
    )


def _facts(config: RunConfig, world_size: int) -> dict[str, str]:
    grpo, sampling, parallel = config.grpo, config.sampling, config.parallel
    size = f"{sampling.height} x {sampling.width}"
    if sampling.num_frames > 1:
        size += f", {sampling.num_frames} frames"
    noise = "" if sampling.noise_level is None else f", noise level {sampling.noise_level:g}"
    tensor, context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    kl = f", KL {grpo.kl_form} x {grpo.kl_beta:g}" if grpo.kl_beta else ", no KL"
    return {
        "rewards": ", ".join(f"{name} x {w:g}" for name, w in config.reward.weights.items()),
        "objective": f"clipped ratio, range {grpo.clip_range:g}; advantage {grpo.advantage}{kl}",
        "an iteration": f"{grpo.prompts_per_iteration} prompts x {grpo.group_size} samples, "
        f"{grpo.updates_per_rollout} optimizer step(s), learning rate {config.optimizer.lr:g}",
        "rollout": f"{sampling.num_steps} steps, {sampling.kernel}{noise}; "
        f"{sampling.step_selection}; {size}",
        "schedule": grpo.schedule,
        "layout": f"{world_size} rank(s): tensor parallel {tensor}, context parallel {context}, "
        f"data parallel {world_size // tensor // context}; {config.model.dtype}",
        "seed": str(config.seed),
    }


def _evaluation_table(
    config: RunConfig, iteration: int, evaluations: Mapping[int, Mapping[str, Any]]
) -> list[str]:
    rows = [evaluations[n] for n in sorted({0, iteration}) if n in evaluations]
    if not any(row["iteration"] == iteration for row in rows):
        rows += [evaluations[n] for n in sorted(evaluations)[-1:] if n < iteration]
    if not rows:
        return ["These weights have not been evaluated."]
    names = list(rows[0]["rewards"])
    judge = config.evaluation
    return [
        f"Fixed prompts ({config.prompts.evaluation or config.prompts.train}) and noise (seed "
        f"{judge.seed}), {judge.num_steps} deterministic steps, {judge.samples_per_prompt} samples "
        "a prompt; 95 % confidence, Student's t over prompts.",
        "",
        f"| iteration | reward | {' | '.join(names)} |",
        f"|---|---|{'---|' * len(names)}",
        *(f"| {row['iteration']} | {' | '.join(_scores(row, names))} |" for row in rows),
    ]


def _scores(row: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """The total and each reward; a run that was resumed from an older version has no intervals."""
    half_widths = row.get("half_widths", {})
    parts = [_score(row["rewards"][name], half_widths.get(name)) for name in names]
    return [_score(row["reward"], row.get("half_width")), *parts]


def _score(mean: float | None, half_width: float | None) -> str:
    if mean is None:
        return "failed"
    return f"{mean:.4f}" + ("" if half_width is None else f" ± {half_width:.4f}")


def _base_model(architecture: Architecture, config: RunConfig) -> str:
    """The base's name on the hub, where its files tell it, or that of its folder."""
    if architecture.base is None:
        return config.model.preset or "random weights"
    try:
        index = json.loads((architecture.base / "model_index.json").read_text(encoding="utf-8"))
        name = index.get("_name_or_path")
    except (OSError, ValueError, AttributeError):
        name = None
    is_hub_name = isinstance(name, str) and name.count("/") == 1 and not name.startswith((".", "/"))
    return name if is_hub_name else architecture.base.name


def _usage(architecture: Architecture, config: RunConfig, adapter: bool) -> list[str]:
    """Lines that load the export, of which the folder is `EXPORT`."""
    pipeline = "WanPipeline" if config.model.family == "wan" else "FluxPipeline"
    base = f'"{_base_model(architecture, config)}"'
    folders = architecture.config.transformer_folders
    if adapter:
        return [
            f"from diffusers import {pipeline}",
            "",
            f"pipeline = {pipeline}.from_pretrained({base})",
            *_load_adapters(folders),
        ]
    kind = architecture.family.class_name
    return [
        f"from diffusers import {pipeline}, {kind}",
        "",
        *(f'{name} = {kind}.from_pretrained("EXPORT", subfolder="{name}")' for name in folders),
        f"pipeline = {pipeline}.from_pretrained("
        f"{base}, {', '.join(f'{name}={name}' for name in folders)})",
    ]


def _load_adapters(folders: Sequence[str]) -> list[str]:
    if len(folders) == 1:
        return ['pipeline.load_lora_weights("EXPORT")']
    second = ", load_into_transformer_2=True"
    return [
        f'pipeline.load_lora_weights("EXPORT/{name}"{second if name == folders[1] else ""})'
        for name in folders
    ]
