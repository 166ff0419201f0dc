# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Two transformers that take turns: each is trained by its own steps, alone if need be."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_leangrpo import platform
from megatron_leangrpo.checkpoint.stored import StoredTensors
from megatron_leangrpo.grpo.experiment import Experiment
from megatron_leangrpo.grpo.optimization import build_optimization
from megatron_leangrpo.grpo.passes import WholeModel
from megatron_leangrpo.grpo.schedules import ReplaySchedule
from megatron_leangrpo.grpo.stats import UpdateStats
from megatron_leangrpo.models.experts import NAMES, runs_high, transformers_of
from tests.grpo import tiny

EXPERTS = tiny.merged(tiny.WAN, {"model": {"preset": "wan_smallest_experts"}})
# With shift 3 the first two of four steps are the first expert's, the third the second's.
ONE_STEP = {"step_selection": "window", "window_size": 1}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Iterator[str]:
    yield tiny.write_prompts(tmp_path_factory.mktemp("prompts"))
    platform.destroy_distributed()


def start(prompts: str, **sections: Any) -> Experiment:
    return tiny.start(tiny.tiny_config(prompts, **tiny.merged(EXPERTS, sections)))


@pytest.mark.parametrize("schedule", ["replay", "retain"])
def test_each_gradient_is_that_of_one_transformer_on_the_steps_that_are_its_own(prompts, schedule):
    experiment = start(prompts)
    runner, kept = experiment.runner(schedule), []
    train = runner.schedule.train

    def keep(ready: Any, *others: Any) -> None:
        for trajectory, advantages in ready:
            windows = [
                dataclasses.replace(
                    window,
                    steps=[
                        dataclasses.replace(s, velocity=s.velocity.detach()) for s in window.steps
                    ],
                )
                for window in trajectory.windows
            ]
            kept.append((dataclasses.replace(trajectory, windows=windows), advantages))
        train(ready, *others)

    runner.schedule.train = keep
    runner.run(0, experiment.sampler.batch(0))
    found = {name: p.main_grad.clone() for name, p in experiment.policy.model.named_parameters()}
    boundary = experiment.policy.model.noise_boundary
    for name, expert in zip(NAMES, transformers_of(experiment.policy.model)):
        # Its own gradients, not megatron's buffers.
        alone = _copy_without_buffers(expert)
        buffers, objective = runner.schedule.buffers, runner.schedule.objective
        passes = WholeModel(experiment.policy.over(alone), None, buffers)
        replay = ReplaySchedule(passes, objective, buffers)
        replay.begin(runner.schedule.scale)
        steps = 0
        for trajectory, advantages in kept:
            own = [
                window
                for window in trajectory.windows
                if runs_high(window.steps[0].timestep, boundary) == (name == "high")
            ]
            steps += len(own)
            part = dataclasses.replace(trajectory, windows=own)
            replay.train([(part, advantages)], UpdateStats())
        assert steps
        for parameter_name, parameter in alone.named_parameters():
            error = tiny.relative_l2(found[f"{name}.{parameter_name}"], parameter.grad)
            # The same kernels on the same numbers; the buffers add up in another order.
            assert error < 1e-6, (name, parameter_name)


def _copy_without_buffers(model: torch.nn.Module) -> torch.nn.Module:
    groups = {id(v): v for m in model.modules() for v in vars(m).values() if _is_group(v)}
    alone = copy.deepcopy(model, groups)
    for parameter, original in zip(alone.parameters(), model.parameters(), strict=True):
        parameter.data = original.detach().clone()
        parameter.grad = None
    return alone


def _is_group(value: Any) -> bool:
    return isinstance(value, torch.distributed.ProcessGroup)


def _state(optimization: Any) -> dict[str, Any]:
    """Weights' optimizer state and place in the schedule of each expert."""
    return {
        name: (
            [
                {k: v.clone() for k, v in state.items() if isinstance(v, torch.Tensor)}
                for part in optimizer.chained_optimizers
                for state in part.optimizer.state.values()
            ],
            optimization.scheduler.state_dict()[name]["num_steps"],
        )
        for name, optimizer in optimization.optimizer.experts.items()
    }


@pytest.mark.parametrize("sharded", [True, False], ids=["distributed optimizer", "plain optimizer"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_that_trains_one_leaves_the_other_as_it_was(prompts, sharded, dtype):
    experiment = start(
        prompts,
        model={"dtype": dtype},
        sampling={**ONE_STEP, "window_starts": [0]},
        optimizer={"use_distributed_optimizer": sharded, "lr_warmup_updates": 2},
    )
    optimization = build_optimization(experiment.model, experiment.config.optimizer, 4)
    history = [(tiny.weights(experiment), _state(optimization))]
    for first in (0, 2, 2):
        selector = dataclasses.replace(experiment.settings.selector, window_starts=(first,))
        experiment.settings = dataclasses.replace(experiment.settings, selector=selector)
        result = experiment.runner("retain").run(0, experiment.sampler.batch(0), optimization.step)
        metrics = result.updates[0]
        assert (metrics["grad_norm_high"] > 0) == (first == 0)
        assert (metrics["grad_norm_low"] > 0) == (first == 2)
        assert metrics["grad_norm"] == max(metrics["grad_norm_high"], metrics["grad_norm_low"])
        history.append((tiny.weights(experiment), _state(optimization)))
    folders = dict(zip(NAMES, ("transformer.", "transformer_2.")))
    for trained, before, after in zip(("high", "low", "low"), history, history[1:]):
        for name, folder in folders.items():
            moved = any(
                not torch.equal(after[0][key], before[0][key])
                for key in before[0]
                if key.startswith(folder)
            )
            assert moved == (name == trained)
        idle = "low" if trained == "high" else "high"
        torch.testing.assert_close(after[1][idle], before[1][idle], rtol=0, atol=0)
        assert after[1][trained][1] == before[1][trained][1] + 1
    assert optimization.updates == 3


def test_a_resumed_run_goes_on_with_both(prompts, tmp_path):
    """Killed after updates of the first one alone: the second one's moments are still none."""
    config = tiny.tiny_config(
        prompts,
        **tiny.merged(
            EXPERTS,
            {
                "model": {"expert_boundary": 0.85},
                "sampling": {
                    "num_steps": 5,
                    "step_selection": "progressive",
                    "window_size": 1,
                    "window_interval": 1,
                    "window_stride": 1,
                },
                "grpo": {"iterations": 3},
                "optimizer": {"ema_decay": 0.9, "ema_interval": 1},
                "checkpoint": {"interval": 1},
            },
        ),
    )
    recipe = tiny.write_recipe(config, tmp_path)
    whole, parts = (str(tmp_path / name) for name in ("whole", "parts"))
    tiny.train_command(recipe, [f"--output={whole}"])
    tiny.train_command(recipe, [f"--output={parts}"], killed_in=3)
    tiny.train_command(recipe, [f"--output={parts}", "--checkpoint.resume=true"])
    rows = tiny.metrics_rows(whole)
    assert [row["grad_norm_high"] > 0 for row in rows] == [True, True, False]
    assert [row["grad_norm_low"] > 0 for row in rows] == [False, False, True]
    stored = [
        StoredTensors(Path(run) / "checkpoints" / "step_000003", average)
        for average in (False, True)
        for run in (whole, parts)
    ]
    for one, other in (stored[:2], stored[2:]):
        assert len(one) and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("schedule", ["replay", "retain", "reweight"])
def test_with_the_idle_one_in_host_memory_the_gradient_is_the_same(prompts, schedule):
    sections = {"grpo": {"micro_batch_size": 1}, "sampling": {"cfg_scale": 2.0}}
    expected, _ = tiny.first_gradient(start(prompts, **sections), schedule)
    experiment = start(prompts, **tiny.merged(sections, {"model": {"expert_offload": True}}))
    model, held = experiment.policy.model, set()

    def weights_held(*_: Any) -> None:
        sizes = [
            sum(p.untyped_storage().nbytes() for p in expert.parameters())
            for expert in transformers_of(model)
        ]
        held.add(tuple(size > 0 for size in sizes))

    handles = [e.register_forward_pre_hook(weights_held) for e in transformers_of(model)]
    found, _ = tiny.first_gradient(experiment, schedule)
    experiment.evaluator().run()
    for handle in handles:
        handle.remove()
    assert held == {(True, False), (False, True)}
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    tiny.train(experiment, 1)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_a_batch_of_both_noise_levels_is_a_mistake_of_ours(prompts):
    with pytest.raises(AssertionError, match="mixes the noise levels"):
        runs_high(torch.tensor([0.9, 0.7]), 0.8)
    assert runs_high(torch.tensor([0.9, 0.9]), 0.9) and not runs_high(torch.tensor([0.89]), 0.9)
