# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Training checkpoints: weights, optimizer, average, schedule and position, in megatron's format.

A checkpoint is written under a temporary name and renamed when every rank has finished, so that a
folder with a step's name is whole. It can be resumed at another tensor- or data-parallel size.
"""

import dataclasses
import json
import queue
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_leangrpo import platform
from megatron_leangrpo.files import atomic_write
from megatron_leangrpo.models.common.weights import sharded_parameters

FORMAT = 1
POSITION = "position.json"
_STEP = re.compile(r"step_(\d+)")
_OPTIMIZER_FORMAT = {"distrib_optim_sharding_type": "fully_reshardable"}


@dataclass
class TrainingState:
    """What a run continues from. `average` maps parameter names to this rank's average weights."""

    model: torch.nn.Module
    optimizer: Any
    scheduler: Any
    average: dict[str, torch.Tensor] | None = None
    window_scores: list[list[float]] = dataclasses.field(default_factory=list)
    """Scores of jagg's windows, which decide the next iteration's routing."""


def save_checkpoint(folder: Path, state: TrainingState, iteration: int) -> Path:
    """Write `folder/step_<iteration>` after that many finished iterations (a collective)."""
    from megatron.core import dist_checkpointing

    final = folder / f"step_{iteration:06d}"
    temporary = folder / f".{final.name}.tmp"
    if platform.is_logging_rank():
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier()
    _use_no_helper_process()
    with platform.host_mode(), _one_error(RuntimeError, f"checkpoint {final} cannot be written"):
        dist_checkpointing.save(_sharded_state(state, loading=False), str(temporary))
    dist.barrier()
    if platform.is_logging_rank():
        position = {
            "format": FORMAT,
            "iteration": iteration,
            "window_scores": state.window_scores,
        }
        atomic_write(temporary / POSITION, json.dumps(position) + "\n")
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
    dist.barrier()
    return final


def _use_no_helper_process() -> None:
    """Let megatron's writer hand over its results in a queue of this process.

    Its default is a queue in a server process of its own, for saves in the background, which ours
    are not. That process outlives a rank that is killed and keeps its output open, so that whoever
    reads a failing run through a pipe waits for ever.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if getattr(filesystem_async, "_results_queue", queue) is None:
        filesystem_async._results_queue = queue.Queue()


def load_checkpoint(checkpoint: Path, state: TrainingState) -> int:
    """Load a checkpoint into `state` in place and return its finished iterations (a collective).

    ``ValueError`` where it cannot be read, or is not of this model and these settings.
    """
    iteration = read_position(checkpoint)
    state.window_scores = _read_window_scores(checkpoint)
    own_settings = _group_settings(state.optimizer)
    _create_optimizer_state(state.optimizer)
    with platform.host_mode():
        loaded = _read(_sharded_state(state, loading=True), checkpoint)
        state.model.load_state_dict(loaded["model"])
        _load_optimizer(state.optimizer, loaded["optimizer"])
        # The run's own settings win over the stored ones (learning rates, betas, epsilon), and of
        # the schedule only the position is taken over.
        for group, settings in zip(state.optimizer.param_groups, own_settings, strict=True):
            group.update(settings)
        state.scheduler.load_state_dict(loaded["scheduler"])
    if state.average is not None:
        for name, value in state.average.items():
            value.copy_(loaded["average"][name])
    return iteration


def _read(sharded_state: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    from megatron.core import dist_checkpointing

    what = (
        f"checkpoint {checkpoint} cannot be read; it is damaged, or of another model or other "
        "settings (optimizer.ema_decay, optimizer.use_distributed_optimizer)"
    )
    with _one_error(ValueError, what):
        return dist_checkpointing.load(sharded_state, str(checkpoint))


@contextmanager
def _one_error(kind: type[Exception], what: str) -> Iterator[None]:
    """Turn whatever megatron and torch raise into one line.

    torch raises the failures of all ranks together as a BaseException, which would end a command
    without a message.
    """
    from torch.distributed.checkpoint import CheckpointException

    try:
        yield
    except (CheckpointException, Exception) as error:
        cause: BaseException = error
        if isinstance(error, CheckpointException):
            cause = next(iter(error.failures.values()))[0]
        if isinstance(cause, KeyboardInterrupt):
            raise cause from None
        lines = str(cause).strip().splitlines() or [""]
        raise kind(f"{what}: {type(cause).__name__} {lines[0]:.200}".rstrip()) from error


def load_weights(checkpoint: Path, model: torch.nn.Module, average: bool) -> None:
    """Load only the weights of a checkpoint, or their average (a collective)."""
    read_position(checkpoint)
    weights = sharded_parameters(model)
    if average:
        values = {name: p.detach() for name, p in model.named_parameters()}
        weights = _average_shards(weights, values)
    with platform.host_mode():
        loaded = _read({"weights": weights}, checkpoint)["weights"]
    model.load_state_dict({name: v for name, v in loaded.items() if v is not None}, strict=False)


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint with the highest iteration number, or None."""
    found = list(_checkpoints(folder))
    return max(found)[1] if found else None


def read_position(checkpoint: Path) -> int:
    """Return the finished iterations of a checkpoint; ``ValueError`` where it is none."""
    try:
        position = json.loads((checkpoint / POSITION).read_text(encoding="utf-8"))
        version, iteration = int(position["format"]), int(position["iteration"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"checkpoint {checkpoint}: no readable {POSITION}: {error}") from error
    if version > FORMAT:
        raise ValueError(
            f"checkpoint {checkpoint}: format {version} is newer than this version reads ({FORMAT})"
        )
    return iteration


def _read_window_scores(checkpoint: Path) -> list[list[float]]:
    position = json.loads((checkpoint / POSITION).read_text(encoding="utf-8"))
    try:
        return [[int(a), int(n), float(score)] for a, n, score in position.get("window_scores", [])]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"checkpoint {checkpoint}: window_scores in {POSITION}: {error}"
        ) from error


def _checkpoints(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _STEP.fullmatch(path.name)
        if match and (path / POSITION).is_file():
            yield int(match[1]), path


def _sharded_state(state: TrainingState, loading: bool) -> dict[str, Any]:
    model = sharded_parameters(state.model)
    optimizer = state.optimizer.sharded_state_dict(
        model, is_loading=loading, metadata=_OPTIMIZER_FORMAT
    )
    result = {"model": model, "optimizer": optimizer, "scheduler": state.scheduler.state_dict()}
    if state.average is not None:
        result["average"] = _average_shards(model, state.average)
    return result


def _torch_adams(optimizer: Any) -> Iterator[tuple[Any, torch.optim.Optimizer]]:
    """Megatron's optimizers that step torch's Adam, and that Adam; apex and TE give none."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW):
            yield part, part.optimizer


def _create_optimizer_state(optimizer: Any) -> None:
    """Give torch's Adam the state a checkpoint is read into; megatron-core leaves out `step`."""
    for _, adam in _torch_adams(optimizer):
        for parameter in (p for group in adam.param_groups for p in group["params"]):
            if not adam.state[parameter]:
                adam.state[parameter] = {
                    "step": torch.zeros(()),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def _group_settings(optimizer: Any) -> list[dict[str, Any]]:
    """What the configuration has said about each parameter group."""
    return [
        {key: value for key, value in group.items() if key not in ("params", "step")}
        for group in optimizer.param_groups
    ]


def _load_optimizer(optimizer: Any, loaded: dict[str, Any]) -> None:
    """Load megatron's optimizer; with torch's Adam around two defects of megatron-core 0.16.

    Its distributed optimizer looks for a `step` among the sharded tensors, where it has not put it,
    and gives all parameters one `step` tensor, which Adam would then advance once for each.
    """
    adams = [(part, adam) for part, adam in _torch_adams(optimizer) if "param_state" in loaded]
    if not adams:
        optimizer.load_state_dict(loaded)
        return
    [(part, adam)] = adams
    sharded = loaded.pop("param_state")
    part.load_state_dict(loaded)
    steps = {parameter: state.pop("step") for parameter, state in adam.state.items()}
    part.load_parameter_state_from_fully_reshardable(sharded)
    for parameter, state in adam.state.items():
        state["step"] = steps[parameter].clone()


def _average_shards(model: dict[str, Any], values: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The average is sharded like the weights, under keys of its own."""
    return {
        name: dataclasses.replace(
            model[name], key=f"average.{model[name].key}", data=value, dtype=value.dtype
        )
        for name, value in values.items()
    }
