# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The command line of checkpoints_tools in the process of a test, and a small FLUX."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from checkpoints_tools import cli
from megatron_leangrpo import errors, platform
from tests.checkpoints_tools import published
from tests.command_line import Outcome
from tests.models.flux_parity import diffusers_model, small_config

Tools = Callable[..., Outcome]


@pytest.fixture
def tools(capfd, monkeypatch) -> Tools:
    """`tools("import", ...)` runs a command; returns status and output."""
    monkeypatch.setattr(errors, "_process_group_is_alive", lambda: False)
    monkeypatch.delenv(errors.TRACEBACK_VARIABLE, raising=False)

    def run(*arguments: object) -> Outcome:
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_:
            cli.main([str(argument) for argument in arguments])
        platform.destroy_distributed()
        return Outcome(exit_.value.code, *capfd.readouterr())

    return run


@pytest.fixture
def refuses(tools) -> Callable[..., None]:
    """`refuses(parts, *arguments)`: one line with all parts, and exit status 2."""

    def check(parts: list[str], *arguments: object) -> None:
        outcome = tools(*arguments)
        assert outcome.status == 2, outcome
        assert outcome.err.count("\n") == 1, outcome.err
        missing = [part for part in parts if part not in outcome.err]
        assert not missing, (missing, outcome.err)

    return check


@pytest.fixture(scope="session")
def flux() -> dict[str, torch.Tensor]:
    """Weights of `small_config()` under diffusers' names; do not change them."""
    state = diffusers_model(small_config()).state_dict()
    return {name: tensor.clone() for name, tensor in state.items()}


@pytest.fixture
def plain(flux, tmp_path):
    """A diffusers transformer folder with them."""
    return published.save_folder(tmp_path / "plain", flux)
