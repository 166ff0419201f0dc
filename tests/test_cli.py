# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What a user can do wrong at the command line: one line, exit status 2, and nothing is touched."""

from __future__ import annotations

import json
import shutil
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_leangrpo.config_reader import packaged_recipes
from megatron_leangrpo.grpo.iteration import IterationRunner
from tests.command_line import files
from tests.grpo import tiny


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> str:
    """A run of milliseconds; 2 prompts x 4 samples."""
    folder = tmp_path_factory.mktemp("recipe")
    config = tiny.tiny_config(tiny.write_prompts(folder, count=2), grpo={"iterations": 2})
    return tiny.write_recipe(config, folder)


TP = "parallel.tensor_model_parallel_size"
WINDOW = ["sampling.step_selection=window", "sampling.timestep_fraction=null"]
# Settings, and what the message must say: setting, value, what is valid.
BAD_SETTINGS = {
    "unknown key": (["grpo.group_sise=3"], ["'grpo.group_sise'", "'grpo.group_size'"]),
    "unknown section": (["grop.group_size=3"], ["'grop.group_size'", "'grpo.group_size'"]),
    "key like no other": (["xyzzy=1"], ["'xyzzy'", "RECIPE --help"]),
    "unknown value": (["grpo.schedule=retian"], ["grpo.schedule", "retian", "'replay', 'retain'"]),
    "wrong type": (["grpo.group_size=many"], ["grpo.group_size", "expected int", "many"]),
    "wrong optional": (["sampling.shift=big"], ["sampling.shift", "expected float or null", "big"]),
    "not a dict": (["reward.weights=3"], ["reward.weights", "expected dict", "3"]),
    "world size": ([f"{TP}=2"], [TP, "is 2", "1 process of this run", "valid values: 1"]),
    "tensor parallel 0": ([f"{TP}=0"], [TP, "is 0", "valid values: 1"]),
    "updates": (
        ["grpo.updates_per_rollout=3"],
        ["grpo.updates_per_rollout = 3", "grpo.group_size = 4", "valid: [1, 2, 4]"],
    ),
    "height": (["sampling.height=40"], ["sampling.height=40", "multiple of 16", "32 or 48"]),
    "width": (["sampling.width=0"], ["sampling.width=0", "multiple of 16", "16 or 32"]),
    "steps": (["sampling.num_steps=0"], ["sampling.num_steps=0", "at least 1"]),
    "one step": (["sampling.num_steps=1"], ["sampling.timestep_fraction=0.99", "num_steps=1"]),
    "window size": (
        [*WINDOW, "sampling.window_size=9", "sampling.window_starts=[0]"],
        ["sampling.window_size=9", "between 1 and 3"],
    ),
    "window start": (
        [*WINDOW, "sampling.window_size=2", "sampling.window_starts=[0,2]"],
        ["sampling.window_starts=[0, 2]", "between 0 and 1"],
    ),
    "window without a size": (WINDOW, ["sampling.window_size=None", "needs it"]),
    "no noise level": (["sampling.noise_level=null"], ["sampling.noise_level=None", "such as"]),
    "noise level": (["sampling.noise_level=.nan"], ["sampling.noise_level=nan", "such as"]),
    "unknown reward": (
        ["reward.weights.jpeg_compresibility=1"],
        ["reward.weights", "'jpeg_compresibility'", "did you mean 'jpeg_compressibility'?"],
    ),
    "reward that does not import": (["reward.weights.no_module:X=1"], ["'no_module:X'"]),
    "no reward": (["reward.weights={}"], ["reward.weights is empty", "ocr"]),
    "reward weight": (
        ["reward.weights={jpeg_compressibility: 0}"],
        ["reward.weights.jpeg_compressibility = 0.0", "finite and not 0"],
    ),
    "preset": (["model.preset=flux_dve"], ["model.preset = 'flux_dve'", "'flux_dev'"]),
    "base": (["model.base=/nowhere"], ["model.base = '/nowhere'", "no such folder", "flux_digits"]),
    "float64": (["model.dtype=float64"], ["model.dtype = float64", "float32, bfloat16"]),
    "wandb": (["wandb=true"], ["wandb=true", "megatron-leangrpo[wandb]"]),
    "group of one": (["grpo.group_size=1"], ["grpo.group_size = 1", "2 or more"]),
    "bounds": (["evaluation.num_steps=0"], ["evaluation.num_steps = 0", "1 or more"]),
    "warm-up": (
        ["optimizer.lr_warmup_updates=3"],
        ["optimizer.lr_warmup_updates = 3", "2 updates", "valid: 0 to 2"],
    ),
    "clip range": (["grpo.clip_range=0"], ["grpo.clip_range=0.0", "between 0 and 1"]),
    "resume without output": (["checkpoint.resume=true"], ["checkpoint.resume needs output"]),
    "resume from nothing": (
        ["checkpoint.resume=true", "output=nothing"],
        ["output: nothing", "no run to resume", "checkpoint.resume=false"],
    ),
    "no prompts": (["prompts.train=null"], ["prompts.train is not set", ".jsonl"]),
    "missing prompts": (["prompts.train=no.txt"], ["prompts.train = 'no.txt'", "no such file"]),
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_a_bad_setting_is_refused_by_name_and_value(leangrpo, recipe, case):
    settings, parts = BAD_SETTINGS[case]
    leangrpo.refuses(parts, "train", recipe, *(f"--{setting}" for setting in settings))


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["COMMAND"]),
        (["trian"], ["'trian'", "'train'"]),
        (["train"], ["RECIPE", "leangrpo train --help"]),
        (["train", "flux_tyni"], ["'flux_tyni'", "did you mean 'flux_tiny'?"]),
        (["train", "mine.yaml"], ["'mine.yaml'", "no such file"]),
        (["train", "flux_bench", "word"], ["word"]),
        (["info", "--verbose"], ["--verbose"]),
        (["compare", "RECIPE", "--schedules", "replay,retian"], ["retian", "replay,retain"]),
        (["compare", "RECIPE", "--repeat", "0"], ["--repeat = 0", "at least 1"]),
        (["compare", "RECIPE", "--repeat", "x"], ["--repeat", "'x'"]),
        (["compare", "RECIPE", "--json", "no/x.json"], ["--json = 'no/x.json'", "does not exist"]),
        (["compare", "RECIPE", "--dump-grads", "."], ["--dump-grads = '.'", "is a directory"]),
        (["compare", "RECIPE", "--grpo.updates_per_rollout=3"], ["updates_per_rollout = 3"]),
        (["sample", "RECIPE", "--checkpoint", "no"], ["checkpoint no"]),
        (["sample", "RECIPE", "--evaluation.grid_images=0"], ["evaluation.grid_images = 0"]),
        (["build-tiny", "sdxl", "--output", "x"], ["'sdxl'", "'flux'", "'wan'"]),
        (["build-tiny", "wan", "--output", "x", "--task", "digits"], ["--task digits", "motion"]),
        (["build-tiny", "flux", "--output", "."], ["--output ."]),
    ],
)
def test_a_bad_command_is_refused_in_one_line(leangrpo, recipe, arguments, parts):
    # What `build-tiny` and others must not write over.
    Path("mine.txt").write_text("mine")
    leangrpo.refuses(parts, *(recipe if word == "RECIPE" else word for word in arguments))


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"", ["empty"]),
        (b"\n \n", ["empty"]),
        ("caf\xe9\n".encode("latin-1"), [":1", "not UTF-8"]),
    ],
)
@pytest.mark.parametrize("setting", ["prompts.train", "prompts.evaluation"])
def test_a_bad_prompt_file_is_refused(leangrpo, recipe, content, parts, setting):
    Path("p.txt").write_bytes(content)
    leangrpo.refuses([setting, "p.txt", *parts], "train", recipe, f"--{setting}=p.txt")


def test_an_evaluation_prompt_that_the_reward_cannot_score_is_found_before_the_run(
    leangrpo, recipe
):
    Path("p.txt").write_text("a red circle\na brown circle\n")
    outcome = leangrpo(
        "train",
        recipe,
        "--reward.weights={color_shape: 1.0}",
        "--prompts.train=flux_shapes/prompts.jsonl",
        "--prompts.evaluation=p.txt",
    )
    assert outcome.status == 2
    assert "p.txt:2" in outcome.err
    assert files(Path()).keys() == {"p.txt"}


def test_more_prompts_than_ranks_can_share_are_refused_with_the_nearest(
    leangrpo, recipe, monkeypatch
):
    monkeypatch.setenv("WORLD_SIZE", "3")
    parts = ["grpo.prompts_per_iteration = 2", "3 data-parallel ranks", "[3]", "spread"]
    leangrpo.refuses(parts, "train", recipe, "--dry-run", "--grpo.placement=local")


OCCUPIED = {
    "a file": ("is a file", lambda: Path("out").write_text("mine")),
    "below a file": ("cannot create", lambda: Path("file").write_text("mine")),
    "foreign files": ("no run made", lambda: _make("out/notes.txt")),
    "a run": ("already holds a run", lambda: _make("out/config.yaml")),
}


def _make(path: str) -> None:
    Path(path).parent.mkdir()
    Path(path).write_text("mine")


@pytest.mark.parametrize(
    ("command", "case"),
    [
        *((["train"], case) for case in OCCUPIED),
        (["train", "--dry-run"], "a run"),
        (["sample"], "foreign files"),
    ],
)
def test_an_occupied_output_is_refused_before_anything_is_loaded(
    leangrpo, recipe, monkeypatch, command, case
):
    def load(*arguments: Any) -> None:
        raise AssertionError("the experiment was built first")

    monkeypatch.setattr("megatron_leangrpo.grpo.experiment.build_experiment", load)
    message, occupy = OCCUPIED[case]
    occupy()
    output = "file/out" if case == "below a file" else "out"
    name, *options = command
    leangrpo.refuses([message, output, "directory"], name, recipe, *options, f"--output={output}")


class NotANumber(tiny.SmoothReward):
    """Its second prompt has no score."""

    def __call__(self, images, prompts, metadata) -> torch.Tensor:
        scores = super().__call__(images, prompts, metadata)
        return torch.where(torch.tensor([p == "the number 1" for p in prompts]), nan, scores)


class Enormous(tiny.SmoothReward):
    """A number in float64, but no gradient in float32."""

    def __call__(self, images, prompts, metadata) -> torch.Tensor:
        return super().__call__(images, prompts, metadata) * 1e300


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (
            ["reward.weights={tests.test_cli:NotANumber: 1.0}"],
            ["tests.test_cli:NotANumber", "'the number 1'", "nan"],
        ),
        (
            ["reward.weights={tests.test_cli:Enormous: 1.0}", "grpo.advantage=dr_grpo"],
            ["the gradient of", "is not finite in iteration 1", "no optimizer step was taken"],
        ),
    ],
)
def test_what_is_not_finite_ends_the_run_with_status_1_and_one_line(
    leangrpo, recipe, settings, parts
):
    # An advantage of 1e300 must not be clipped away.
    options = [*settings, "grpo.adv_clip=null", "output=run"]
    outcome = leangrpo("train", recipe, *(f"--{option}" for option in options))
    assert outcome.status == 1, outcome
    assert outcome.err.startswith("leangrpo: error: ")
    assert outcome.err.count("\n") == 1
    assert all(part in outcome.err for part in parts), outcome.err
    assert "iteration 1/" not in outcome.out
    # What is there is whole, and says what was run.
    assert leangrpo("train", "run/config.yaml", "--output=again", "--dry-run").status == 0


def test_interrupting_says_so_in_one_line(leangrpo, recipe, monkeypatch):
    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(IterationRunner, "run", interrupt)
    outcome = leangrpo("train", recipe)
    assert (outcome.status, outcome.err) == (130, "leangrpo: interrupted\n")


def test_interrupting_a_save_is_no_failure_of_the_save(leangrpo, recipe, monkeypatch):
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint import CheckpointException

    def interrupt(*arguments: Any, **options: Any) -> None:
        raise CheckpointException("write", {0: (KeyboardInterrupt(), None)})

    monkeypatch.setattr(dist_checkpointing, "save", interrupt)
    outcome = leangrpo("train", recipe, "--grpo.iterations=1", "--checkpoint.interval=1")
    assert (outcome.status, outcome.err) == (130, "leangrpo: interrupted\n")


def test_train_resume_and_sample(leangrpo, recipe):
    """What a newcomer does, mistakes included."""
    assert leangrpo("train", recipe, "--output=run", "--checkpoint.interval=1").status == 0
    run = files(Path("run"))
    assert {"config.yaml", "metrics.jsonl", "summary.json", "curves.png"} <= run.keys()

    leangrpo.refuses(["already holds a run", "resume=true"], "train", recipe, "--output=run")
    resume = ["--output=run", "--checkpoint.resume=true"]
    outcome = leangrpo("train", recipe, *resume)
    assert (outcome.status, outcome.err) == (0, "")
    assert "has finished its 2 iterations" in outcome.out
    now = files(Path("run"))
    assert now.keys() == run.keys()
    # Every start is noted in the log.
    noted = {".lock", "logs/rank_00000.jsonl"}
    assert {k: v for k, v in now.items() if k not in noted} == {
        k: v for k, v in run.items() if k not in noted
    }

    shutil.copytree("run", "broken")
    shutil.rmtree("broken/checkpoints")
    resume = ["--output=broken", "--checkpoint.resume=true"]
    leangrpo.refuses(["broken", "holds no checkpoint"], "train", recipe, *resume)

    outcome = leangrpo("sample", recipe, "--checkpoint=run", "--output=pictures")
    assert (outcome.status, outcome.err) == (0, "")
    assert "step_000002" in outcome.out
    assert len(list(Path("pictures/samples").glob("0*.png"))) == 2
    leangrpo.refuses(["no readable manifest.json"], "sample", recipe, "--checkpoint=pictures")


def test_compare_writes_its_table_and_its_gradient(leangrpo, recipe):
    files = ["--json", "table.json", "--dump-grads", "gradient.safetensors"]
    outcome = leangrpo("compare", recipe, "--schedules", "replay, retain", "--repeat", "1", *files)
    assert (outcome.status, outcome.err) == (0, "")
    table = json.loads(Path("table.json").read_text())
    assert table["schedules"].keys() == {"replay", "retain"}
    documented = {"rel_error", "cosine", "time_rollout", "time_update", "time_total"}
    assert documented | {"peak_activation_bytes"} <= table["schedules"]["retain"].keys()
    assert table["schedules"]["retain"]["rel_error"] <= 1e-6
    assert table["settings"]["grpo"]["group_size"] == 4
    gradient = load_file("gradient.safetensors")
    assert gradient["proj_out.weight"].any()
    assert all(line in outcome.out for line in ("replay", "retain", "rel. error"))


def test_help_shows_the_recipes_and_then_the_settings_of_one(leangrpo):
    outcome = leangrpo("train", "--help")
    assert (outcome.status, outcome.err) == (0, "")
    assert all(f"\n  {name} " in outcome.out for name in packaged_recipes())

    outcome = leangrpo("train", "flux_tiny_jpeg", "--help")
    assert (outcome.status, outcome.err) == (0, "")
    text = " ".join(outcome.out.split())
    assert "--dry-run" in text
    assert "Samples a prompt (G). (type: int, default: 12)" in text
    assert "default: {'jpeg_compressibility': 1.0})" in text


@pytest.mark.parametrize("command", ["train", "compare", "sample"])
def test_print_config_resolves_the_recipe_and_the_overrides(leangrpo, command):
    outcome = leangrpo(command, "flux_tiny", "--grpo.group_size=6", "--print_config")
    assert (outcome.status, outcome.err) == (0, "")
    Path("mine.yaml").write_text(outcome.out)
    assert "  group_size: 6\n" in outcome.out
    assert leangrpo(command, "mine.yaml", "--print_config").out == outcome.out
