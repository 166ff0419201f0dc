# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""One line an iteration to metrics.jsonl, TensorBoard and, when asked, Weights & Biases."""

import json
import math
import os
from collections.abc import Mapping
from typing import Any

from megatron_leangrpo.reporting.run_directory import RunDirectory

REQUIRED_KEYS = (
    "reward_mean",
    "reward_std",
    "zero_std_ratio",
    "grad_norm",
    "ratio_min",
    "ratio_max",
    "time_rollout",
    "time_reward",
    "time_update",
    "time_total",
    "samples_per_second",
    "peak_memory_bytes",
    "schedule",
)
"""Names that scripts rely on, besides `iteration` and a `reward_<name>` for every reward."""

_SECTIONS = ("eval", "reward", "ratio", "time")


class MetricsWriter:
    """Writes metrics on the rank that owns the run directory.

    `completed_iterations` is where a resumed run continues: later lines and events of the earlier
    run are dropped, so that each iteration appears once.
    """

    def __init__(
        self,
        directory: RunDirectory,
        completed_iterations: int = 0,
        wandb_config: dict[str, Any] | None = None,
    ) -> None:
        # Imported here because it takes over a second.
        from torch.utils.tensorboard import SummaryWriter

        continues = completed_iterations > 0 or directory.metrics.exists()
        if continues:
            directory.truncate_metrics(completed_iterations)
        self._wandb = None if wandb_config is None else _start_wandb(directory, wandb_config)
        self._tensorboard = SummaryWriter(
            str(directory.tensorboard),
            purge_step=completed_iterations + 1 if continues else None,
        )
        self._file = os.open(directory.metrics, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, iteration: int, metrics: Mapping[str, float | int | str | None]) -> None:
        """Append one iteration. A number that is not finite becomes null, which is valid JSON."""
        missing = [key for key in REQUIRED_KEYS if key not in metrics]
        assert not missing, f"metrics lack {missing}"
        row = {"iteration": iteration, **{key: _plain(value) for key, value in metrics.items()}}
        # One write a line: a killed run leaves at most one cut line, the last.
        os.write(self._file, (json.dumps(row, allow_nan=False) + "\n").encode())
        self.write_scalars(iteration, row)

    def write_scalars(self, iteration: int, values: Mapping[str, Any]) -> None:
        """Send numbers to TensorBoard and Weights & Biases only (the evaluation before a run)."""
        scalars = {
            tag(key): value
            for key, value in values.items()
            if key != "iteration" and isinstance(value, int | float) and math.isfinite(value)
        }
        for name, value in scalars.items():
            self._tensorboard.add_scalar(name, value, iteration)
        if self._wandb is not None:
            self._wandb.log(scalars, step=iteration)

    def close(self) -> None:
        """Flush everything."""
        os.close(self._file)
        self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def tag(key: str) -> str:
    """Return the TensorBoard tag of a metric: `reward_mean` is shown as `reward/mean`."""
    for section in _SECTIONS:
        if key.startswith(f"{section}_"):
            return f"{section}/{key[len(section) + 1 :]}"
    return key if "/" in key else f"train/{key}"


def _plain(value: Any) -> float | int | str | bool | None:
    """A JSON value; tensors and numpy numbers become Python numbers."""
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def import_wandb() -> Any:
    """The module; ValueError says how to get it."""
    try:
        import wandb
    except ImportError as error:
        raise ValueError(
            "wandb=true needs the package wandb: pip install 'megatron-leangrpo[wandb]'; "
            "valid without it: wandb=false"
        ) from error
    return wandb


def _start_wandb(directory: RunDirectory, config: dict[str, Any]) -> Any:
    return import_wandb().init(
        project="megatron_leangrpo",
        name=directory.path.name,
        dir=str(directory.path),
        config=config,
    )
