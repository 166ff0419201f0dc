# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Models side by side: the run's numbers, their differences, and a report that stands alone."""

from __future__ import annotations

import json
import math
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_leangrpo import platform
from megatron_leangrpo.grpo import commands
from tests.grpo import tiny

# float32 samples in batches of another composition.
SAME = 1e-5
PROMPTS = ["the number 1", "<script>alert('7')</script> & more", "the number 3"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("recipe")
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    config = tiny.tiny_config(
        str(folder / "prompts.txt"),
        sampling={"num_steps": 2},
        grpo={"iterations": 2, "prompts_per_iteration": 2, "group_size": 2, "schedule": "replay"},
        reward={"weights": {tiny.SMOOTH: 1.0, tiny.CENTRE: 0.5}},
        optimizer={"ema_decay": 0.9, "ema_interval": 1, "lr": 1e-2},
        evaluation={"interval": 1, "samples_per_prompt": 2, "max_prompts": 3, "grid_images": 4},
        checkpoint={"interval": 1},
    )
    return tiny.write_recipe(config, folder)


@pytest.fixture(scope="module")
def run(recipe, tmp_path_factory) -> Path:
    return tiny.finished_run(recipe, tmp_path_factory.mktemp("runs") / "first")


def evaluate(recipe: str, output: Path, *checkpoints: Path | str) -> dict[str, Any]:
    json_path = output.with_suffix(".json")
    commands.evaluate(recipe, [f"--output={output}"], [str(c) for c in checkpoints], str(json_path))
    content = json.loads(json_path.read_text())
    assert content == json.loads((output / "evaluation.json").read_text())
    return content["models"]


@pytest.fixture(scope="module")
def models(recipe, run, tmp_path_factory) -> tuple[dict[str, Any], Path]:
    """The base, the run's average, its live weights, an earlier one, and the export."""
    output = tmp_path_factory.mktemp("evaluation") / "out"
    export = run / "export" / "step_000002"
    earlier = run / "checkpoints" / "step_000001"
    return evaluate(recipe, output, run, f"{run}:live", earlier, export), output


def score(model: dict[str, Any], reward: str = "reward") -> float:
    return model["scores"][reward]["mean"]


def test_the_scores_are_those_of_the_run_whatever_the_weights_come_from(models, run):
    found, _ = models
    names = ["base", "first/step_000002 average", "first/step_000002 live"]
    assert list(found) == [*names, "first/step_000001 average", "first/step_000002"]
    rows = {
        r["iteration"]: r for r in json.loads((run / "summary.json").read_text())["evaluations"]
    }
    for name, iteration in (("base", 0), (names[1], 2), ("first/step_000001 average", 1)):
        assert math.isclose(score(found[name]), rows[iteration]["reward"], rel_tol=SAME)
        for reward, value in rows[iteration]["rewards"].items():
            assert math.isclose(score(found[name], reward), value, rel_tol=SAME)
    assert math.isclose(score(found["first/step_000002"]), score(found[names[1]]), rel_tol=SAME)
    assert not math.isclose(score(found[names[2]]), score(found[names[1]]), rel_tol=SAME)


def test_differences_are_paired_and_surer_than_the_scores(models):
    found, _ = models
    base, trained = found["base"], found["first/step_000002 live"]
    assert base["differences"] == {}
    for reward, change in trained["differences"].items():
        expected = score(trained, reward) - score(base, reward)
        assert math.isclose(change["mean"], expected, rel_tol=1e-6, abs_tol=1e-12)
        assert change["prompts"] == 3 and change["half_width"] > 0
    assert base["checks"]["distance_to_base"]["mean"] == 0
    assert trained["checks"]["distance_to_base"]["mean"] > 0
    assert trained["checks"]["diversity"]["mean"] > 0


def evaluate_on_ranks(recipe: str, output: str, run: str) -> None:
    from unittest import mock

    with mock.patch.object(platform, "destroy_distributed"):
        commands.evaluate(recipe, [f"--output={output}"], [run])


@pytest.mark.slow
def test_two_ranks_have_the_numbers_of_one(models, recipe, run, run_ranks, tmp_path):
    run_ranks(2, evaluate_on_ranks, recipe, str(tmp_path / "out"), str(run))
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text())["models"]
    for name, model in found.items():
        for kind in ("scores", "checks"):
            for key, interval in model[kind].items():
                expected = models[0][name][kind][key]
                assert math.isclose(interval["mean"], expected["mean"], rel_tol=1e-4, abs_tol=1e-6)


class Page(HTMLParser):
    """What a page shows, and what it would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.images: list[str] = []
        self.fetched: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "srcset"):
                is_inline = value.startswith("data:image/png;base64,")
                (self.images if is_inline else self.fetched).append(value)

    def handle_data(self, data):
        self.text += data


def test_the_report_is_one_file_that_fetches_and_runs_nothing(models):
    found, output = models
    text = (output / "report.html").read_text()
    page = Page(text)
    assert page.fetched == [] and "script" not in page.tags and "url(" not in text
    # Four rows of every model, and the curves of the run, once.
    assert len(page.images) == 4 * len(found) + 1
    for expected in (*PROMPTS, *found, "Difference from base", "diversity in a group"):
        assert expected in page.text, expected
    assert sorted(p.name for p in output.iterdir() if not p.name.startswith(".")) == [
        "evaluation.json",
        "report.html",
        "samples",
    ]
    assert sorted(p.name for p in (output / "samples").iterdir())[:2] == [
        "0-base.png",
        "1-first-step-000002-average.png",
    ]


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (.ci/run installs Debian's)")
def test_chromium_shows_its_curves_and_pictures(tmp_path):
    """Colours that nothing but the pictures have are in the screenshot, as large as they should."""
    import subprocess

    import numpy as np
    from PIL import Image

    from megatron_leangrpo.reporting.html_report import Picture, Table, write_report

    magenta, cyan = (
        torch.tensor(c).view(3, 1, 1).expand(3, 32, 32) for c in ((1.0, 0, 1), (0.0, 1, 1))
    )
    run = tmp_path / "run"
    run.mkdir()
    rows = [{"iteration": n, "reward_mean": n / 5, "grad_norm": 1.0} for n in range(1, 6)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluations = [{"iteration": n, "reward": n / 5} for n in (0, 5)]
    (run / "summary.json").write_text(json.dumps({"evaluations": evaluations}))
    page, shot = tmp_path / "report.html", tmp_path / "shot.png"
    write_report(
        page,
        title="a title",
        facts=["a fact"],
        warnings=["now: a warning"],
        tables=[Table("Rewards", ["model", "reward"], [["base", "0"], ["now", "1"]])],
        curves=[run],
        models=["base", "now"],
        rows=[("a prompt", [Picture(magenta, 0.0, False), Picture(cyan, 1.0, True)])],
    )
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--incognito"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1200,1800"]
    command = [CHROMIUM, *options, f"--screenshot={shot}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    pixels = np.asarray(Image.open(shot).convert("RGB")).reshape(-1, 3)

    def count(*color: int) -> int:
        return int((pixels == color).all(axis=1).sum())

    # A picture of 32 pixels is shown three times as large.
    assert count(255, 0, 255) == count(0, 255, 255) == 96 * 96
    # The evaluations of the curves are orange, the warning has its colour.
    assert count(0xE8, 0x71, 0x0A) > 100
    assert count(0xFC, 0xE8, 0xE6) > 1000


BAD = {
    "nothing": (["nowhere"], "'nowhere' does not exist; give a run, a checkpoint of it"),
    "twice": (["{run}", "{run}/checkpoints/step_000002"], "step_000002 average is given twice"),
    "live export": (["{run}/export/step_000002:live"], "one set of weights; leave :live"),
    "no checkpoint": (["{run}/samples"], "no readable manifest.json"),
}


@pytest.mark.parametrize("bad", BAD)
def test_what_cannot_be_evaluated_is_refused_before_anything_is_loaded(recipe, run, tmp_path, bad):
    checkpoints, message = BAD[bad]
    named = [text.format(run=run) for text in checkpoints]
    with pytest.raises(ValueError, match=r"manifest|exist|twice|leave") as error:
        commands.evaluate(recipe, [f"--output={tmp_path / 'out'}"], named)
    assert message in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_without_an_average_says_so(recipe, tmp_path):
    run = tmp_path / "run"
    options = ["--grpo.iterations=1", "--optimizer.ema_decay=0", "--evaluation.interval=0"]
    tiny.train_command(recipe, [f"--output={run}", *options])
    platform.destroy_distributed()
    with pytest.raises(ValueError, match="holds no weight average; leave :average"):
        commands.evaluate(recipe, [], [f"{run}:average"])
