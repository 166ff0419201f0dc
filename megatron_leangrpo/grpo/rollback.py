# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Takes a run that has gone astray back to the checkpoint of its best evaluation.

Weights, average, moments, FP8 scales and jagg's scores become those of the checkpoint. Iterations
and the position in the learning-rate schedule are counted on, so that the run ends where it would
have: what follows has later prompts and other noise, and a learning rate that is multiplied with
`operations.rollback_lr_factor`.
"""

from collections.abc import Collection
from typing import Any

from megatron_leangrpo import platform
from megatron_leangrpo.checkpoint.saving import CheckpointSaver
from megatron_leangrpo.checkpoint.training import TrainingState, find_best, load_checkpoint
from megatron_leangrpo.config import OperationsConfig
from megatron_leangrpo.reporting.console import Console

_REASONS = {"collapse", "spike"}
"""Alarms after which earlier weights help."""


class _Unmoved:
    """A learning-rate schedule that loading leaves where it is."""

    def __init__(self, scheduler: Any) -> None:
        self.state_dict = scheduler.state_dict

    def load_state_dict(self, state: Any) -> None:
        pass


class Rollback:
    """Counts how often a run has gone back, and goes back."""

    def __init__(self, config: OperationsConfig, saver: CheckpointSaver, console: Console) -> None:
        self._config, self._saver, self._console = config, saver, console
        self.taken = 0

    @property
    def is_possible(self) -> bool:
        """Whether the run may ever go back."""
        return self._config.rollbacks > 0

    def resume(self, taken: int, optimizer: Any) -> None:
        """Continue a run that has gone back so often before its checkpoint."""
        self.taken = taken
        _scale_learning_rates(optimizer, self._config.rollback_lr_factor**taken)

    def is_due(self, alarms: Collection[str]) -> bool:
        """Whether the run goes back after these alarms; the first rank's count (a collective)."""
        if not self.is_possible:
            return False
        is_lost = platform.is_logging_rank() and not _REASONS.isdisjoint(alarms)
        return platform.smallest_over_ranks(-int(is_lost)) < 0

    def go_back(self, state: TrainingState, done: int) -> bool:
        """Load the best whole checkpoint into `state` after iteration `done` (a collective).

        Says what it does. False where there is no checkpoint, or rollbacks are used up.
        """
        limit, factor = self._config.rollbacks, self._config.rollback_lr_factor
        if self.taken >= limit:
            self._console.warning(
                f"no rollback after iteration {done}: all of operations.rollbacks = {limit} have "
                "been used; the run goes on as it is"
            )
            return False
        self._saver.finish()
        found = find_best(self._saver.folder)
        for reason in found.skipped:
            self._console.warning(f"passed over checkpoint {reason}")
        if found.checkpoint is None:
            self._console.warning(
                f"no rollback after iteration {done}: no checkpoint has been evaluated yet"
            )
            return False
        state.scheduler = _Unmoved(state.scheduler)
        iteration = load_checkpoint(found.checkpoint, state)
        _scale_learning_rates(state.optimizer, factor)
        self.taken += 1
        text = (
            f"rollback {self.taken} of {limit} after iteration {done}: weights, average and "
            f"optimizer are those of the best checkpoint, after iteration {iteration}; the run "
            f"goes on with later prompts, other noise and {factor:g} x the learning rate"
        )
        self._console.line(text)
        self._console.record("rollback", text, iteration=done, checkpoint=str(found.checkpoint))
        return True


def _scale_learning_rates(optimizer: Any, factor: float) -> None:
    """Scale what megatron's schedule derives the learning rate of each group from."""
    for group in optimizer.param_groups:
        for name in ("max_lr", "min_lr"):
            group[name] *= factor
