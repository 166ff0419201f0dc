# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Training checkpoints: weights, optimizer, average, schedule and position, in megatron's format.

A checkpoint is written under a temporary name and renamed when every rank has finished, so that a
folder with a step's name is whole. It can be resumed at another tensor- or data-parallel size.
"""

import dataclasses
import json
import queue
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_leangrpo import platform
from megatron_leangrpo.checkpoint.store import (
    FileRecord,
    Found,
    Manifest,
    checkpoints,
    file_damage,
    first_whole,
    manifest_damage,
    prune,
    publish,
    read_manifest,
    record_file,
    step_folder,
    temporary_folder,
    write_manifest,
)
from megatron_leangrpo.checkpoint.unpickling import only_data
from megatron_leangrpo.models.common.weights import sharded_parameters

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


def save_checkpoint(
    folder: Path,
    state: TrainingState,
    iteration: int,
    keep: int,
    reward: float | None = None,
) -> Path:
    """Write `folder/step_<iteration>` after that many finished iterations (a collective).

    `reward` is that of an evaluation of these weights. Afterwards the `keep` newest checkpoints and
    the best one stay.
    """
    from megatron.core import dist_checkpointing

    temporary = temporary_folder(folder, iteration)
    if platform.is_logging_rank():
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier()
    _use_no_helper_process()
    with platform.host_mode():
        sharded = _sharded_state(state, loading=False)
    what = f"checkpoint {step_folder(folder, iteration)} cannot be written"
    with platform.host_mode(), _one_error(RuntimeError, what, _num_bytes(sharded), folder):
        dist_checkpointing.save(sharded, str(temporary))
        files = _record_files(temporary)
    if platform.is_logging_rank():
        write_manifest(temporary, Manifest(iteration, reward, state.window_scores, files))
        publish(folder, iteration)
        prune(folder, keep)
    dist.barrier()
    return step_folder(folder, iteration)


def _record_files(temporary: Path) -> dict[str, FileRecord]:
    """Sizes and checksums of all files, on the logging rank; every rank reads those it wrote."""
    own = {
        path.name: record_file(path)
        for path in temporary.iterdir()
        if path.name.startswith(f"__{platform.rank()}_")
    }
    notes = temporary / f".files_{platform.rank()}.json"
    notes.write_text(json.dumps({name: dataclasses.astuple(r) for name, r in own.items()}))
    dist.barrier()
    files: dict[str, FileRecord] = {}
    if platform.is_logging_rank():
        for path in sorted(temporary.glob(".files_*.json")):
            found = json.loads(path.read_text())
            files |= {name: FileRecord(*record) for name, record in found.items()}
            path.unlink()
        files |= {p.name: record_file(p) for p in temporary.iterdir() if p.name not in files}
    return files


def find_newest(folder: Path) -> Found:
    """Look for the newest whole checkpoint; the ranks share the reading (a collective)."""
    found = dict(checkpoints(folder))
    # The logging rank's list counts: all must look at the same folders.
    count = _from_logging_rank([len(found)])[0]
    numbers = list(found) if platform.is_logging_rank() else [0] * count
    return first_whole(map(found.__getitem__, _from_logging_rank(numbers)), damage_on_any_rank)


def damage_on_any_rank(checkpoint: Path) -> str | None:
    """Say what is wrong with a checkpoint, or None; each rank reads its share (a collective)."""
    try:
        files = sorted(read_manifest(checkpoint).files.items())
    except ValueError as error:
        return manifest_damage(error)

    def wrong(position: int) -> str | None:
        name, record = files[position]
        return file_damage(checkpoint / name, record)

    own = range(platform.rank(), len(files), platform.world_size())
    first = torch.tensor(
        next((i for i in own if wrong(i) is not None), len(files)), device=platform.device()
    )
    dist.all_reduce(first, op=dist.ReduceOp.MIN)
    if int(first) == len(files):
        return None
    return wrong(int(first)) or f"{files[int(first)][0]} is damaged for another rank"


def _from_logging_rank(values: list[int]) -> list[int]:
    tensor = torch.tensor(values, dtype=torch.int64, device=platform.device())
    dist.broadcast(tensor, src=0)
    return tensor.tolist()


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
    manifest = read_manifest(checkpoint)
    state.window_scores = manifest.window_scores
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
    return manifest.iteration


def _read(sharded_state: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    from megatron.core import dist_checkpointing

    what = (
        f"checkpoint {checkpoint} cannot be read; it is damaged, or of another model or other "
        "settings (optimizer.ema_decay, optimizer.use_distributed_optimizer)"
    )
    with _one_error(ValueError, what), only_data():
        return dist_checkpointing.load(sharded_state, str(checkpoint))


@contextmanager
def _one_error(
    kind: type[Exception], what: str, needed: int = 0, folder: Path | None = None
) -> Iterator[None]:
    """Turn whatever megatron and torch raise into one line, with the space it is about.

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
        space = ""
        if folder is not None:
            free = shutil.disk_usage(folder).free
            space = f" (about {needed >> 20} MiB are needed and {free >> 20} MiB free there)"
        raise kind(f"{what}: {type(cause).__name__} {lines[0]:.200}".rstrip() + space) from error


def load_weights(checkpoint: Path, model: torch.nn.Module, average: bool) -> None:
    """Load only the weights of a checkpoint, or their average (a collective).

    ``ValueError`` where a file of it is not as it was written.
    """
    wrong = damage_on_any_rank(checkpoint)
    if wrong is not None:
        raise ValueError(f"checkpoint {checkpoint} is damaged: {wrong}")
    weights = sharded_parameters(model)
    if average:
        values = {name: p.detach() for name, p in model.named_parameters()}
        weights = _average_shards(weights, values)
    with platform.host_mode():
        loaded = _read({"weights": weights}, checkpoint)["weights"]
    model.load_state_dict({name: v for name, v in loaded.items() if v is not None}, strict=False)


def _sharded_state(state: TrainingState, loading: bool) -> dict[str, Any]:
    model = sharded_parameters(state.model)
    optimizer = state.optimizer.sharded_state_dict(
        model, is_loading=loading, metadata=_OPTIMIZER_FORMAT
    )
    result = {"model": model, "optimizer": optimizer, "scheduler": state.scheduler.state_dict()}
    if state.average is not None:
        result["average"] = _average_shards(model, state.average)
    return result


def _num_bytes(value: Any) -> int:
    """Bytes of the tensors that this and all other ranks write (a collective)."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica

    def own(value: Any) -> int:
        if isinstance(value, dict):
            return sum(own(inner) for inner in value.values())
        if isinstance(value, list):
            return sum(own(inner) for inner in value)
        if isinstance(value, ShardedTensor) and is_main_replica(value.replica_id):
            return value.data.nbytes
        return 0

    total = torch.tensor(own(value), device=platform.device())
    dist.all_reduce(total)
    return int(total)


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
