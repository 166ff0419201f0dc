# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What a training checkpoint holds (weights, optimizer, average, schedule, position), and loading.

It is in megatron's format and can be resumed at another tensor-, pipeline- or data-parallel size.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_leangrpo import platform
from megatron_leangrpo.checkpoint.frozen import check_frozen
from megatron_leangrpo.checkpoint.store import (
    Found,
    best_first,
    checkpoints,
    file_damage,
    first_whole,
    manifest_damage,
    read_manifest,
)
from megatron_leangrpo.checkpoint.unpickling import only_data
from megatron_leangrpo.models.common.weights import sharded_parameters
from megatron_leangrpo.precision.scaling import load_scales, sharded_scales

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
    transformer_config: Mapping[str, Any] | None = None
    """Diffusers' `config.json` of the model; not loaded."""
    rollbacks: int = 0
    """How often the run has gone back to its best checkpoint."""


def find_newest(folder: Path) -> Found:
    """Look for the newest whole checkpoint; the ranks share the reading (a collective)."""
    return _first_whole_of([number for number, _ in checkpoints(folder)], folder)


def find_best(folder: Path) -> Found:
    """Look for the whole checkpoint with the best evaluation reward, likewise."""
    return _first_whole_of(best_first(folder), folder)


def _first_whole_of(numbers: list[int], folder: Path) -> Found:
    # The logging rank's list counts: all must look at the same folders.
    count = _from_logging_rank([len(numbers)])[0]
    numbers = numbers if platform.is_logging_rank() else [0] * count
    found = dict(checkpoints(folder))
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


def load_checkpoint(checkpoint: Path, state: TrainingState) -> int:
    """Load a checkpoint into `state` in place and return its finished iterations (a collective).

    ``ValueError`` where it cannot be read, or is not of this model and these settings.
    """
    manifest = read_manifest(checkpoint)
    check_frozen(checkpoint, manifest.frozen, state.model)
    state.window_scores, state.rollbacks = manifest.window_scores, manifest.rollbacks
    own_settings = _group_settings(state.optimizer)
    with platform.host_mode():
        loaded = _read(sharded_state(state, loading=True), checkpoint)
        state.model.load_state_dict(loaded["model"], strict=False)
        _load_optimizer(state.optimizer, loaded["optimizer"])
        # The run's own settings win over the stored ones (learning rates, betas, epsilon), and of
        # the schedule only the position is taken over.
        for group, settings in zip(state.optimizer.param_groups, own_settings, strict=True):
            group.update(settings)
        state.scheduler.load_state_dict(loaded["scheduler"])
        load_scales(state.model, loaded.get("fp8", {}))
    if state.average is not None:
        for name, value in state.average.items():
            value.copy_(loaded["average"][name])
    return manifest.iteration


def _read(sharded_state: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    from megatron.core import dist_checkpointing

    what = (
        f"checkpoint {checkpoint} cannot be read; it is damaged, or of another model or other "
        "settings (optimizer.ema_decay, optimizer.use_distributed_optimizer, fp8.recipe)"
    )
    with one_error(ValueError, what), only_data():
        return dist_checkpointing.load(sharded_state, str(checkpoint))


@contextmanager
def one_error(kind: type[Exception], what: str) -> Iterator[None]:
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
        raise kind(f"{what}: {first_line(cause)}") from error


def first_line(error: BaseException) -> str:
    """What an error says first, after its type."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__} {lines[0]:.200}".rstrip()


def load_weights(checkpoint: Path, model: torch.nn.Module, average: bool) -> None:
    """Load only the weights of a checkpoint, or their average (a collective).

    ``ValueError`` where a file of it is not as it was written.
    """
    wrong = damage_on_any_rank(checkpoint)
    if wrong is not None:
        raise ValueError(f"checkpoint {checkpoint} is damaged: {wrong}")
    check_frozen(checkpoint, read_manifest(checkpoint).frozen, model)
    weights = _trained(model)
    if average:
        values = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
        weights = _average_shards(weights, values)
    with platform.host_mode():
        loaded = _read({"weights": weights}, checkpoint)["weights"]
    model.load_state_dict({name: v for name, v in loaded.items() if v is not None}, strict=False)


def sharded_state(state: TrainingState, loading: bool) -> dict[str, Any]:
    """Everything of a run that a checkpoint holds, in megatron's terms (a collective)."""
    model = _trained(state.model)
    _create_optimizer_state(state.optimizer)
    optimizer = state.optimizer.sharded_state_dict(
        model, is_loading=loading, metadata=_OPTIMIZER_FORMAT
    )
    result = {"model": model, "optimizer": optimizer, "scheduler": state.scheduler.state_dict()}
    scales = sharded_scales(state.model)
    if scales:
        result["fp8"] = scales
    if state.average is not None:
        result["average"] = _average_shards(model, state.average)
    return result


def _trained(model: torch.nn.Module) -> dict[str, Any]:
    """What a run trains, sharded; a frozen base under adapters is where the run found it."""
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    return {name: shard for name, shard in sharded_parameters(model).items() if name in trained}


def _torch_adams(optimizer: Any) -> Iterator[tuple[Any, torch.optim.Optimizer]]:
    """Megatron's optimizers that step torch's Adam, and that Adam; apex and TE give none."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW):
            yield part, part.optimizer


def _create_optimizer_state(optimizer: Any) -> None:
    """Give torch's Adam the state that a checkpoint holds where it has taken no step yet.

    megatron-core leaves out `step`, and an expert that was never trained has nothing.
    """
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
    if hasattr(optimizer, "experts"):
        for name, expert in optimizer.experts.items():
            _load_optimizer(expert, loaded[name])
        return
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
