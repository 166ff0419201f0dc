# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Prompts beyond what an encoder reads, and prompts that make bad file names (HB26)."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from PIL import Image

from megatron_leangrpo.conditioning import FluxTextEncoder
from megatron_leangrpo.config_reader import read_config, read_recipe
from megatron_leangrpo.grpo import commands, run_report
from megatron_leangrpo.grpo.experiment import build_experiment

WORDS = " ".join(f"word{n % 97}" for n in range(700))
LONG = [
    f"{WORDS} and finally a circle",
    f"{WORDS} and finally a square",
    "x" * 5000,
    "the number 7",
]
NAMES = ["y" * 300, "a/b/c ../d", ".hidden", "The Number 7", "the number 7", "con", "trailing dot."]

# (prompts, how each line about a cut begins, what of it counts tokens)
FILES = {
    "long": (
        LONG,
        {
            'prompt "word0 word1 word2 ': "CLIP keeps 77 of 4134 tokens, T5 keeps 8 of 4834 tokens",
            'prompt "xxxxx': "CLIP keeps 77 of 5002 tokens, T5 keeps 8 of 5002 tokens",
        },
        3,
    ),
    "names": (
        NAMES,
        {
            'prompt "yyyyy': "CLIP keeps 77 of 302 tokens, T5 keeps 8 of 302 tokens",
            'prompt "a/b/c ../d"': "is cut: T5 keeps 8 of 11 tokens",
            'prompt ".hidden"': "is cut: T5 keeps 8 of 9 tokens",
            'prompt "The Number 7"': "is cut: T5 keeps 8 of 14 tokens",
            'prompt "trailing dot."': "is cut: T5 keeps 8 of 15 tokens",
        },
        5,
    ),
}


@pytest.fixture
def prompt_file(tmp_path, monkeypatch, request) -> Path:
    """A prompt file beside the directory in which the commands run."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(FILES[request.param][0]) + "\n")
    return path


def overrides(prompt_file: Path) -> list[str]:
    return [
        f"--prompts.train={prompt_file}",
        "--reward.weights={jpeg_compressibility: 1.0}",
        "--grpo.iterations=1",
        "--grpo.prompts_per_iteration=4",
        "--grpo.group_size=2",
        "--evaluation.samples_per_prompt=1",
        "--evaluation.num_steps=2",
        "--checkpoint.interval=-1",
    ]


def check_lines(text: str, name: str) -> None:
    """One line for each prompt that is cut, one for those that are equal after it."""
    lines = [line for line in text.splitlines() if line.startswith("warning: ")]
    _, expected, count = FILES[name]
    cut = [line for line in lines if " is cut: " in line]
    assert len(cut) == count
    for beginning, counts in expected.items():
        found = [line for line in cut if beginning in line]
        assert found and all(counts in line for line in found), (beginning, cut)
    equal = [line for line in lines if "equal after the cut" in line]
    assert len(equal) == (1 if name == "long" else 0)
    assert all("a circle" in line and "a square" in line for line in equal)
    assert len(lines) == len(cut) + len(equal)
    assert max(map(len, lines)) < 300


def check_files(folder: Path) -> None:
    """All files are inside the run directories of `folder/here`, with names that fit."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    outside = [path for path in files if not path.is_relative_to(folder / "here" / "runs")]
    assert outside == [folder / "prompts.txt"]
    assert all(len(path.name.encode()) < 255 for path in files)


@pytest.mark.parametrize(
    ("prompt_file", "name"), [(name, name) for name in FILES], indirect=["prompt_file"]
)
def test_runs_and_pictures_twice_in_a_row(prompt_file, name, tmp_path, capsys):
    options = [*overrides(prompt_file), "--prompts.embedding_cache=runs/embeddings"]
    load = FluxTextEncoder.from_pipeline
    for number in (1, 2):
        # The second run finds everything in the cache, what it says of cuts too.
        loaded = mock.Mock(side_effect=load if number == 1 else AssertionError)
        with (
            mock.patch.object(run_report, "save_curves"),
            mock.patch.object(FluxTextEncoder, "from_pipeline", loaded),
        ):
            commands.train("flux_tiny", options)
        assert loaded.call_count == (1 if number == 1 else 0)
        out = capsys.readouterr().out
        new = len(FILES[name][0]) if number == 1 else 0
        assert f"embeddings: {new} of {len(FILES[name][0])} prompts are new" in out
        check_lines(out, name)
        with mock.patch.object(FluxTextEncoder, "from_pipeline", side_effect=AssertionError):
            commands.sample("flux_tiny", options)
        check_lines(capsys.readouterr().out, name)
        check_files(tmp_path)
        samples = Path("runs") / f"flux_tiny-samples-{number}" / "samples"
        assert len(list(samples.glob("0*.png"))) == len(FILES[name][0])


@pytest.mark.parametrize("prompt_file", ["long"], indirect=True)
def test_prompts_that_are_equal_after_the_cut_stay_separate_groups(single_process, prompt_file):
    config = read_config(read_recipe("flux_tiny"), overrides(prompt_file))
    experiment = build_experiment(config)
    first, second = (experiment.encode([prompt]) for prompt in LONG[:2])
    assert torch.equal(first.prompt_embeds, second.prompt_embeds)
    assert torch.equal(first.pooled, second.pooled)

    batch = experiment.sampler.batch(0)
    result = experiment.runner("replay").run(0, batch)
    assert sorted(group.prompt.id for group in result.groups) == [0, 1, 2, 3]
    # One prompt's samples in two groups: another noise, and so other pictures.
    images = {
        prompt.id: sample.image
        for (prompt, _), sample in zip(
            experiment.evaluator().items, experiment.evaluator().run().samples
        )
    }
    assert not torch.equal(images[0], images[1])


@pytest.mark.parametrize("prompt_file", ["names"], indirect=True)
def test_names_that_differ_only_in_case_are_two_pictures(prompt_file):
    commands.sample("flux_tiny", [*overrides(prompt_file), "--output=pictures"])
    pictures = sorted(Path("pictures/samples").glob("*-the-number-7.png"))
    assert [path.name[:8] for path in pictures] == ["00003-00", "00004-00"]
    contents = [Image.open(path).tobytes() for path in pictures]
    assert contents[0] != contents[1]
