# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Fixtures every test may use."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from megatron_leangrpo.reporting.quiet import quiet_libraries
from tests.distributed.launcher import RankLauncher

if TYPE_CHECKING:
    from tests.command_line import CommandLine

# Set before any test module imports torch: the ranks of a test share the machine's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# As the command line does before it imports anything heavy: libraries read this when imported.
quiet_libraries()
# How fast a machine makes its examples is nothing that a test is about.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


# What takes seconds to repeat, in another layout or dtype, what a faster test shows every day.
REPEATED_SLOWLY = (
    "benchmarks/test_benchmarks.py::test_one_rank_measures_both_replays_of_both_sides_and_our_schedules[wan",
    "benchmarks/test_benchmarks.py::test_two_ranks",
    "benchmarks/test_benchmarks.py::test_without_jagg",
    "checkpoint/test_resume.py::test_a_damaged_newest_checkpoint_is_named_and_the_one_before_continues[dp",
    "checkpoint/test_resume.py::test_a_killed_run_resumes_bit_for_bit[alone, bfloat16",
    "checkpoint/test_resume.py::test_a_killed_run_resumes_bit_for_bit[adapters, pp",
    "checkpoint/test_resume.py::test_a_run_resumes_in_another_layout[adapters",
    "checkpoint/test_resume.py::test_a_run_resumes_in_another_layout[alone-cp",
    "checkpoint/test_resume.py::test_a_run_resumes_in_another_layout[dp",
    "checkpoint/test_resume.py::test_a_run_resumes_in_another_layout[tp 2-pp",
    "checkpoint/test_resume.py::test_a_run_resumes_in_another_layout[tp 2-tp 4",
    "checkpoint/test_resume.py::test_adapters_of_all_stages_are_exported",
    "checkpoint/test_saving.py::test_a_run_resumes_from_the_newest_whole_checkpoint"
    "_and_says_what_it_passed_over[_copied_away",
    "checkpoints_tools/test_round_trip.py::test_an_import_loads_at_every_tensor_parallel_size[1-4",
    "grpo/test_jagg.py::test_on_two_ranks_jagg_gives_one_gradient_on_every_schedule[1-False",
    "grpo/test_jagg.py::test_on_two_ranks_jagg_gives_one_gradient_on_every_schedule[2-",
    "grpo/test_lora.py::test_two_ranks_give_the_gradient_of_one[1",
    "grpo/test_prompt_use.py::test_a_resumed_run_goes_on_with_the_same_prompts[p8",
    "grpo/test_reweight.py::test_in_one_process_reweight_gives_the_gradient_of_replay[float32",
    "grpo/test_schedules_agree.py::test_in_every_layout_both_schedules_give_the_gradient_of_one_process"
    "[tp 2 cp 2-float32",
    "grpo/test_schedules_agree.py::test_in_every_layout_both_schedules_give_the_gradient_of_one_process"
    "[tp 2 dp 2-float32",
    "grpo/test_schedules_agree.py::test_in_every_layout_both_schedules_give_the_gradient_of_one_process"
    "[tp 4-float32",
    "planner/test_memory.py::test_the_predicted_peak_is_the_measured_one[bfloat16",
    "planner/test_memory.py::test_the_predicted_peak_is_the_measured_one[wide",
    "rewards/test_remote_run.py",
    "test_contributing.py::test_adding_a_model",
    "test_contributing.py::test_adding_a_recipe",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the slow repetitions to launch/test.sh --all."""
    for item in items:
        if item.nodeid.removeprefix("tests/").startswith(REPEATED_SLOWLY):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Imported modules stay: megatron's checkpoints, which collect garbage, leave them out."""
    gc.freeze()


@pytest.fixture(scope="session")
def run_ranks() -> Iterator[RankLauncher]:
    """Run a function on real gloo ranks: `run_ranks(world_size, function, *args, **kwargs)`.

    Returns a list with every rank's return value, in rank order. `function` must be defined at the
    top level of a test module; its arguments and its results must pickle (tensors are fine).
    The ranks are processes that are reused until another world size is asked for, one thread each,
    already joined in a gloo world: call `platform.initialize_distributed(...)` first, as often as
    you like and with any sizes, and never `destroy_distributed()`. One rank alone runs in the
    test's own process.
    A rank that raises fails the test with its traceback; a hang ends after `timeout_seconds`
    (a keyword, 120 by default). After a failure the next call gets fresh processes.
    """
    launcher = RankLauncher()
    yield launcher
    launcher.close()


@pytest.fixture
def single_process() -> Iterator[None]:
    """Megatron's groups with this process alone in them, for tests that need no ranks."""
    from megatron_leangrpo import platform

    platform.initialize_distributed(tensor_model_parallel_size=1)
    yield
    platform.destroy_distributed()


@pytest.fixture
def leangrpo(capfd, monkeypatch, tmp_path) -> Iterator[CommandLine]:
    """Run `leangrpo` in this process, in an empty directory: `leangrpo("train", recipe)`."""
    from megatron_leangrpo import errors, platform
    from tests.command_line import CommandLine

    # A failing command would leave the process at once, to wait for no other rank.
    monkeypatch.setattr(errors, "_process_group_is_alive", lambda: False)
    monkeypatch.delenv(errors.TRACEBACK_VARIABLE, raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield CommandLine(capfd)
    platform.destroy_distributed()
