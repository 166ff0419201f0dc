# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Who may write into a run directory, and what a resumed run finds there."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron_leangrpo.reporting.run_directory import RunDirectory


@pytest.fixture
def finished_run(tmp_path: Path) -> Path:
    with RunDirectory.create(tmp_path / "run", "flux_tiny") as directory:
        directory.write_config("seed: 0\n")
    return tmp_path / "run"


def test_default_directories_are_numbered_after_the_highest_that_exists(tmp_path):
    for name in (
        "flux_tiny-2",
        "flux_tiny-9",
        "flux_tiny-10",
        "flux_tiny_shapes-40",
        "flux_tiny-x",
    ):
        (tmp_path / name).mkdir()
    with RunDirectory.create(None, "flux_tiny", parent=str(tmp_path)) as directory:
        assert directory.path.name == "flux_tiny-11"
        assert directory.samples.is_dir()


def test_runs_that_start_together_get_different_directories(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        made = list(
            pool.map(lambda _: RunDirectory.create(None, "r", parent=str(tmp_path)), range(16))
        )
    assert len({directory.path for directory in made}) == 16


def test_a_recipe_given_as_a_path_names_a_directory_inside_the_parent(tmp_path):
    with RunDirectory.create(None, "../../etc/my recipe", parent=str(tmp_path)) as directory:
        assert directory.path.parent == tmp_path


def test_a_directory_with_foreign_files_is_refused_and_left_as_it_was(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"output: .* holds files that no run made \(thesis.tex\)"):
        RunDirectory.create(tmp_path, "flux_tiny")
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_an_earlier_run_is_not_mixed_with_a_new_one(finished_run):
    with pytest.raises(ValueError, match=r"already holds a run; .* checkpoint.resume=true"):
        RunDirectory.create(finished_run, "flux_tiny")


def test_an_empty_directory_may_be_used(tmp_path):
    with RunDirectory.create(tmp_path, "flux_tiny") as directory:
        assert directory.path == tmp_path


@pytest.mark.parametrize("output", ["file", "file/run"])
def test_an_output_that_cannot_be_a_directory_is_named(tmp_path, output):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="output: "):
        RunDirectory.create(tmp_path / output, "flux_tiny")
    with pytest.raises(ValueError, match="output: cannot create a run directory"):
        RunDirectory.create(None, "flux_tiny", parent=str(tmp_path / "file"))


def test_two_runs_cannot_write_one_directory(finished_run):
    held = RunDirectory.resume(finished_run)
    with pytest.raises(ValueError, match=f"written by another run .process {os.getpid()} on"):
        RunDirectory.resume(finished_run)
    held.close()
    RunDirectory.resume(finished_run).close()


def test_the_lock_goes_with_its_process(finished_run):
    program = (
        "import os, sys; from megatron_leangrpo.reporting.run_directory import RunDirectory;"
        "held = RunDirectory.resume(sys.argv[1]); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", program, finished_run]).returncode == -9
    RunDirectory.resume(finished_run).close()


def test_a_new_run_cannot_enter_a_directory_that_another_has_just_locked(tmp_path):
    with (
        RunDirectory.create(tmp_path / "run", "a"),
        pytest.raises(ValueError, match="written by another run"),
    ):
        RunDirectory.create(tmp_path / "run", "b")


@pytest.mark.parametrize("name", ["missing", "."])
def test_resume_needs_a_run(tmp_path, name):
    with pytest.raises(ValueError, match="holds no run to resume"):
        RunDirectory.resume(tmp_path / name)
    with pytest.raises(ValueError, match=r"checkpoint\.resume needs output"):
        RunDirectory.resume(None)


def test_truncation_leaves_each_iteration_once(finished_run):
    directory = RunDirectory(finished_run)
    rows = [{"iteration": n, "reward_mean": n / 10} for n in (1, 2, 3, 3, 4, 5)]
    cut = '{"iteration": 6, "rewa'
    directory.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows) + cut)
    directory.truncate_metrics(4)
    lines = directory.metrics.read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [1, 2, 3, 4]
    assert directory.metrics_rows() == [rows[0], rows[1], rows[2], rows[4]]


def test_a_summary_is_valid_json_or_an_error(finished_run):
    directory = RunDirectory(finished_run)
    directory.write_summary({"eval_reward_after": 0.5})
    with pytest.raises(ValueError):
        directory.write_summary({"eval_reward_after": float("nan")})
    assert json.loads(directory.summary.read_text()) == {"eval_reward_after": 0.5}


def test_a_forked_helper_does_not_keep_the_lock_of_its_run(tmp_path):
    """Megatron writes checkpoints in forks; they outlive a run that is killed for a moment."""
    directory = RunDirectory.create(tmp_path / "run", "recipe")
    directory.write_config("seed: 0\n")
    starts, ends = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ends[1])
        os.write(starts[1], b"!")
        os.read(ends[0], 1)
        os._exit(0)
    os.read(starts[0], 1)
    directory.close()
    RunDirectory.resume(tmp_path / "run").close()
    os.close(ends[1])
    os.waitpid(pid, 0)
    for end in (*starts, ends[0]):
        os.close(end)
