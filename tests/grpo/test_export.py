# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What a run exports, diffusers loads: the same velocity, and a card that says what it is."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatron_leangrpo import platform
from megatron_leangrpo.checkpoint.training import load_weights
from megatron_leangrpo.grpo import commands
from megatron_leangrpo.grpo.intervals import mean_over_prompts, t_quantile
from megatron_leangrpo.models.flux.config import to_diffusers_config
from tests.grpo import tiny

# float32 forwards of the same weights in other kernels.
VELOCITY = 1e-5


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("recipe")
    config = tiny.tiny_config(
        tiny.write_prompts(folder),
        sampling={"num_steps": 2},
        grpo={"iterations": 3, "prompts_per_iteration": 2, "group_size": 2, "schedule": "replay"},
        optimizer={"ema_decay": 0.9, "ema_interval": 1, "lr": 1e-2},
        evaluation={"interval": 2},
        checkpoint={"interval": 0, "export_interval": 2},
    )
    return tiny.write_recipe(config, folder)


@pytest.fixture(scope="module")
def run(recipe, tmp_path_factory) -> Path:
    return tiny.finished_run(recipe, tmp_path_factory.mktemp("run") / "run")


def test_exports_come_at_the_interval_and_at_the_end_with_their_checkpoints(run):
    for kind in ("export", "checkpoints"):
        assert sorted(p.name for p in (run / kind).iterdir()) == ["step_000002", "step_000003"]
    files = sorted(str(p.relative_to(run)) for p in (run / "export" / "step_000002").rglob("*"))
    step = "export/step_000002"
    assert files == [
        f"{step}/README.md",
        f"{step}/transformer",
        f"{step}/transformer/config.json",
        f"{step}/transformer/diffusion_pytorch_model.safetensors",
    ]


def test_a_diffusers_pipeline_of_the_export_has_the_velocity_of_the_average(recipe, run):
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    theirs = FluxTransformer2DModel.from_pretrained(
        run / "export" / "step_000003", subfolder="transformer"
    )
    pipeline = FluxPipeline(
        transformer=theirs,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=None,
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
    )
    config, _ = commands.load(recipe, [])
    experiment = tiny.start(config)
    load_weights(run / "checkpoints" / "step_000003", experiment.policy.model, average=True)
    conditioning = experiment.encode(["the number 1"])
    torch.manual_seed(0)
    x = torch.randn(1, *experiment.settings.latent_shape)
    rows, columns = experiment.policy.grid
    with torch.no_grad():
        ours = experiment.policy(x, torch.tensor([0.5]), conditioning)
        expected = pipeline.transformer(
            hidden_states=x,
            timestep=torch.tensor([0.5]),
            guidance=conditioning.guidance,
            pooled_projections=conditioning.pooled,
            encoder_hidden_states=conditioning.prompt_embeds,
            txt_ids=torch.zeros(conditioning.prompt_embeds.shape[1], 3),
            img_ids=pipeline._prepare_latent_image_ids(1, rows, columns, "cpu", torch.float32),
            return_dict=False,
        )[0]
    assert tiny.relative_l2(ours, expected) < VELOCITY
    platform.destroy_distributed()


def test_adapters_are_exported_alone_and_diffusers_loads_them(recipe, tmp_path):
    from diffusers import FluxTransformer2DModel

    config, _ = commands.load(recipe, [])
    base = FluxTransformer2DModel(**_sizes(to_diffusers_config(tiny.flux_smallest())))
    base.load_state_dict(tiny.weights(tiny.start(config)))
    platform.destroy_distributed()

    run = tmp_path / "run"
    tiny.train_command(recipe, [f"--output={run}", "--lora.rank=2", "--grpo.iterations=1"])
    platform.destroy_distributed()
    export = run / "export" / "step_000001"
    assert sorted(p.name for p in export.iterdir()) == [
        "README.md",
        "pytorch_lora_weights.safetensors",
    ]
    base.load_lora_adapter(str(export), weight_name="pytorch_lora_weights.safetensors")

    lora, _ = commands.load(recipe, ["--lora.rank=2"])
    experiment = tiny.start(lora)
    load_weights(run / "checkpoints" / "step_000001", experiment.policy.model, average=True)
    conditioning = experiment.encode(["the number 1"])
    torch.manual_seed(0)
    x = torch.randn(1, *experiment.settings.latent_shape)
    with torch.no_grad():
        ours = experiment.policy(x, torch.tensor([0.5]), conditioning)
        adapted, plain = (_velocity(base, x, conditioning, on) for on in (True, False))
    assert tiny.relative_l2(ours, adapted) < VELOCITY
    assert tiny.relative_l2(ours, plain) > 100 * VELOCITY
    front, body = front_matter((export / "README.md").read_text())
    assert front["base_model_relation"] == "adapter" and "load_lora_weights" in body
    platform.destroy_distributed()


def _sizes(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if not key.startswith("_")}


def _velocity(model: Any, x: torch.Tensor, conditioning: Any, adapted: bool) -> torch.Tensor:
    from diffusers import FluxPipeline

    model.enable_lora() if adapted else model.disable_lora()
    side = int(x.shape[1] ** 0.5)
    return model(
        hidden_states=x,
        timestep=torch.tensor([0.5]),
        guidance=conditioning.guidance,
        pooled_projections=conditioning.pooled,
        encoder_hidden_states=conditioning.prompt_embeds,
        txt_ids=torch.zeros(conditioning.prompt_embeds.shape[1], 3),
        img_ids=FluxPipeline._prepare_latent_image_ids(1, side, side, "cpu", torch.float32),
        return_dict=False,
    )[0]


def front_matter(card: str) -> tuple[dict[str, Any], str]:
    _, front, body = card.split("---\n", 2)
    return yaml.safe_load(front), body


def test_the_card_says_what_the_weights_are_and_how_they_score(run):
    front, body = front_matter((run / "export" / "step_000002" / "README.md").read_text())
    assert front["library_name"] == "diffusers" and front["base_model"] == tiny.PRESET
    assert {"grpo", "flux"} <= set(front["tags"])
    summary = json.loads((run / "summary.json").read_text())
    [row] = [row for row in summary["evaluations"] if row["iteration"] == 2]
    for text in (
        "the average of the weights after 2 of 3 iterations",
        "tests.grpo.tiny:SmoothReward x 1",
        "flow_grpo_group_std, no KL",
        "| schedule | replay |",
        "1 rank(s): tensor parallel 1, context parallel 1, data parallel 1; float32",
        f"| 2 | {row['reward']:.4f} ± {row['half_width']:.4f} |",
        'FluxTransformer2DModel.from_pretrained("EXPORT", subfolder="transformer")',
    ):
        assert text in body, text
    # The base beside it, nothing later.
    assert "\n| 0 | " in body and "\n| 3 | " not in body


def test_a_run_that_keeps_no_checkpoints_exports_none(recipe, tmp_path):
    run = tmp_path / "run"
    options = ["--checkpoint.interval=-1", "--grpo.iterations=1"]
    tiny.train_command(recipe, [f"--output={run}", *options])
    assert not (run / "export").exists() and not (run / "checkpoints").exists()
    platform.destroy_distributed()


def test_an_export_that_was_cut_off_is_made_when_the_run_is_resumed(recipe, run, tmp_path):
    """Also where the run has nothing else to do."""
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    export = copy / "export" / "step_000003"
    card = (export / "README.md").read_text()
    export.rename(export.with_name(".step_000003.tmp"))
    (export.with_name(".step_000003.tmp") / "README.md").unlink()
    tiny.train_command(recipe, [f"--output={copy}", "--checkpoint.resume=true"])
    platform.destroy_distributed()
    assert sorted(p.name for p in export.parent.iterdir()) == ["step_000002", "step_000003"]
    assert (export / "README.md").read_text() == card
    for file in (run / "export" / "step_000003" / "transformer").iterdir():
        assert (export / "transformer" / file.name).read_bytes() == file.read_bytes()


def test_a_disk_without_space_for_an_export_keeps_the_checkpoint(recipe, tmp_path, monkeypatch):
    from megatron_leangrpo.models import saving

    run = tmp_path / "run"
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(saving.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(RuntimeError, match=r"checkpoint\.export_interval: about .* GB are needed"):
        tiny.train_command(recipe, [f"--output={run}", "--grpo.iterations=1"])
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step_000001"]
    platform.destroy_distributed()


@pytest.mark.parametrize(
    ("freedom", "expected"), [(1, 12.706), (2, 4.303), (3, 3.182), (9, 2.262), (63, 1.998)]
)
def test_the_quantiles_are_those_of_students_t(freedom, expected):
    assert math.isclose(t_quantile(freedom), expected, rel_tol=2e-3)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    """Five prompts with effects of their own; four samples each would look like twenty."""
    generator = torch.Generator().manual_seed(0)
    prompt_ids, covered, trials = [n for n in range(5) for _ in range(4)], 0, 1000
    for _ in range(trials):
        effect = torch.randn(5, generator=generator).repeat_interleave(4)
        values = effect + 0.3 * torch.randn(20, generator=generator)
        interval = mean_over_prompts(values, prompt_ids)
        covered += abs(interval.mean) <= interval.half_width
    # Three standard errors of a share of 0.95 in 1000 trials are 0.021.
    assert abs(covered / trials - 0.95) < 0.021


def test_a_prompt_without_a_score_is_left_out_and_one_alone_has_no_interval():
    nan = math.nan
    interval = mean_over_prompts(torch.tensor([1.0, nan, 3.0, nan]), [7, 8, 7, 8])
    assert (interval.mean, interval.half_width, interval.prompts) == (2.0, None, 1)
    assert str(interval) == "2"
