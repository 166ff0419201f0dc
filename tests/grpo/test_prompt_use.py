# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Prompt files with fewer lines than an iteration has groups, and with equal lines (HB28).

Eight prompts an iteration, six iterations, resumed after the third.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from megatron_leangrpo import platform
from megatron_leangrpo.conditioning.prompts import PromptSampler
from megatron_leangrpo.grpo import commands
from megatron_leangrpo.grpo.inputs import read_prompts
from megatron_leangrpo.grpo.placement import Group, place
from tests.grpo import tiny

PER_ITERATION, ITERATIONS, GROUP_SIZE = 8, 6, 2
# The files of the case: so many distinct lines, and eight lines of which three are distinct.
FILES = {f"p{count}": list(range(count)) for count in (1, 2, 3, 5, 7, 8)}
FILES["p8_of_3"] = [n % 3 for n in range(8)]


@pytest.fixture(scope="module")
def recipes(tmp_path_factory) -> dict[str, str]:
    """A recipe for each prompt file."""
    folder = tmp_path_factory.mktemp("recipes")
    paths = {}
    for name, numbers in FILES.items():
        prompts = folder / f"{name}.txt"
        prompts.write_text("".join(f"the number {n}\n" for n in numbers))
        config = tiny.tiny_config(
            str(prompts),
            sampling={"num_steps": 2, "timestep_fraction": 0.5, "shared_initial_noise": True},
            grpo={
                "iterations": ITERATIONS,
                "prompts_per_iteration": PER_ITERATION,
                "group_size": GROUP_SIZE,
                "micro_batch_size": 16,
            },
            checkpoint={"interval": 3},
        )
        paths[name] = tiny.write_recipe(config, folder, name)
    return paths


def sampler_of(recipe: str) -> PromptSampler:
    config, _ = commands.load(recipe, [])
    prompts, _ = read_prompts(config)
    return PromptSampler(prompts, config.grpo.prompts_per_iteration, config.seed)


def line_of(prompt_id: int, name: str) -> int:
    """The line of the file that a draw of a prompt comes from."""
    return prompt_id % len(FILES[name])


@pytest.mark.parametrize("name", FILES)
def test_every_line_is_used_equally_often_and_each_draw_is_a_group(recipes, name):
    sampler = sampler_of(recipes[name])
    uses: Counter[int] = Counter(dict.fromkeys(range(len(FILES[name])), 0))
    for iteration in range(ITERATIONS):
        batch = sampler.batch(iteration)
        assert len({prompt.id for prompt in batch}) == PER_ITERATION
        for prompt in batch:
            line = line_of(prompt.id, name)
            assert prompt.text == f"the number {FILES[name][line]}"
            uses[line] += 1
        assert max(uses.values()) - min(uses.values()) <= 1, iteration


@pytest.mark.parametrize("placement", ["spread", "local"])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", ["p3", "p8_of_3"])
def test_ranks_share_the_same_groups_whatever_their_number(recipes, name, world, placement):
    sampler = sampler_of(recipes[name])
    for iteration in range(ITERATIONS):
        groups = [Group(i, prompt) for i, prompt in enumerate(sampler.batch(iteration))]
        slots = [
            (slot.prompt_id, slot.member)
            for rank in range(world)
            for wave in place(
                groups, GROUP_SIZE, dp_rank=rank, dp_size=world, placement=placement
            ).waves
            for slot in wave.slots
        ]
        ids = [group.prompt.id for group in groups]
        assert sorted(slots) == sorted((i, m) for i in ids for m in range(GROUP_SIZE))


@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        (3, []),
        (3, ["--grpo.placement=local"]),
        (5, []),
        (1, ["--grpo.prompts_per_iteration=0"]),
    ],
)
def test_numbers_that_cannot_work_are_refused_with_the_nearest_that_can(
    recipes, monkeypatch, world, overrides
):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    with pytest.raises(ValueError, match=r"grpo\.prompts_per_iteration") as error:
        commands.train(recipes["p3"], overrides, dry_run=True)
    nearest = {3: "[6, 9]", 5: "[5, 10]", 1: "1 or more"}[world]
    assert nearest in str(error.value)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_numbers_that_can_work_pass_the_dry_run(recipes, monkeypatch, world, capsys):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    prompts = 9 if world == 3 else 8
    commands.train(recipes["p3"], [f"--grpo.prompts_per_iteration={prompts}"], dry_run=True)
    assert f"{prompts} prompts x 2 samples" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["p1", "p8_of_3"])
def test_groups_of_the_same_text_have_noise_of_their_own(single_process, recipes, name):
    """Also where the members of a group share their first latent."""
    experiment = tiny.start(commands.load(recipes[name], [])[0])
    result = experiment.runner("replay").run(0, experiment.sampler.batch(0))
    assert len({group.prompt.text for group in result.groups}) < PER_ITERATION
    rewards = result.table.values[..., 0]
    distinct = torch.unique(rewards.flatten())
    assert len(distinct) == PER_ITERATION * GROUP_SIZE


@pytest.mark.parametrize(("name", "world"), [("p3", 1), ("p8_of_3", 2)])
def test_a_resumed_run_goes_on_with_the_same_prompts(run_ranks, recipes, tmp_path, name, world):
    def train(folder: Path, *options: str, killed_in: int | None = None):
        arguments = (recipes[name], [f"--output={folder}", *options], killed_in)
        if world == 1:
            used = tiny.train_command(*arguments)
            platform.destroy_distributed()
            return used
        first, *others = run_ranks(world, tiny.train_command, *arguments)
        assert all(other == first for other in others)
        return first

    batches = [sampler_of(recipes[name]).batch(iteration) for iteration in range(ITERATIONS)]
    expected = [[(prompt.id, prompt.text) for prompt in batch] for batch in batches]
    run = tmp_path / "run"
    before = train(run, killed_in=5)
    after = train(run, "--checkpoint.resume=true")
    assert before == expected[:4]
    assert after == expected[3:]
    assert [row["iteration"] for row in tiny.metrics_rows(run)] == list(range(1, 7))
