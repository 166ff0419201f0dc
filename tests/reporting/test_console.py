# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What is printed, on a terminal and in a pipe."""

import io

import pytest
from rich.console import Console as RichConsole

from megatron_leangrpo.reporting import console as console_module
from megatron_leangrpo.reporting.console import Console


@pytest.fixture
def piped() -> tuple[Console, io.StringIO]:
    output = io.StringIO()
    return Console(output=RichConsole(file=output, width=40, markup=False)), output


@pytest.fixture
def terminal() -> tuple[Console, io.StringIO]:
    output = io.StringIO()
    rich_console = console_module._Terminal(
        file=output, force_terminal=True, width=100, markup=False, color_system=None
    )
    return Console(output=rich_console), output


def test_a_line_in_a_pipe_is_neither_wrapped_nor_interpreted(piped):
    console, output = piped
    text = "prompt [bold]7[/bold] " + "word " * 40 + "end"
    console.line(text)
    assert output.getvalue() == text + "\n"


def test_other_ranks_are_silent(capsys):
    console = Console(enabled=False)
    console.line("a")
    console.warning("b")
    console.facts("c", {"d": 1})
    console.table(["e"], [["f"]])
    with console.progress("g", 2) as advance:
        advance(1)
        advance()
    assert capsys.readouterr().out == ""


def test_a_warning_is_said_once(piped):
    console, output = piped
    for _ in range(3):
        console.warning("no OCR")
    assert output.getvalue() == "warning: no OCR\n"


def test_a_short_phase_says_nothing_in_a_pipe(piped):
    console, output = piped
    with console.progress("rollout", 3) as advance:
        advance(3)
    assert output.getvalue() == ""


def test_a_long_phase_says_how_far_it_is_in_a_pipe(piped, monkeypatch):
    monkeypatch.setattr(console_module, "_PLAIN_PROGRESS_SECONDS", -1.0)
    console, output = piped
    with console.progress("rollout", 3) as advance:
        advance(2)
        advance()
    assert output.getvalue() == "rollout: 2/3\nrollout: 3/3\n"


def test_phases_nest_on_a_terminal_and_leave_no_bar_behind(terminal):
    console, output = terminal
    with console.progress("training", 2) as outer:
        with console.progress("rollout", 4) as inner:
            inner(4)
            console.line("iteration 1/2")
        outer()
    console.line("done")
    text = output.getvalue()
    assert "training" in text
    assert "rollout" in text
    assert "iteration 1/2\n" in text
    assert text.endswith("done\n")


def test_the_cursor_is_never_hidden(terminal):
    # A rank that is killed could not show it again.
    console, output = terminal
    with console.progress("rollout", 1) as advance:
        advance()
    assert "\x1b[?25l" not in output.getvalue()


def test_a_phase_that_fails_ends_its_bar(terminal):
    console, _ = terminal
    with pytest.raises(RuntimeError), console.progress("rollout", 1):
        raise RuntimeError
    with console.progress("rollout", 1) as advance:
        advance()


def test_tables_and_facts_are_aligned_in_a_pipe(piped):
    console, output = piped
    console.facts("run", {"model": "flux", "schedule": "retain"})
    console.table(["schedule", "seconds"], [["replay", "1.25"], ["retain", "10.5"]], title="times")
    assert output.getvalue().splitlines() == [
        "run",
        "  model     flux",
        "  schedule  retain",
        "times",
        "schedule  seconds",
        "replay       1.25",
        "retain       10.5",
    ]
