# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""CUDA or host (CPU + gloo): the device, the process groups, and what megatron-core needs on a CPU.

megatron-core names CUDA in many places by habit. On a machine without CUDA the few names it needs
are adapted here and nowhere else; with CUDA present nothing is patched.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

_TP_SETTING = "parallel.tensor_model_parallel_size"
_CP_SETTING = "parallel.context_parallel_size"
_PP_SETTING = "parallel.pipeline_model_parallel_size"
_timeout_seconds = 600.0
_Kept = TypeVar("_Kept", bound=dict)


def is_host() -> bool:
    """True when there is no CUDA device, so that everything runs on the CPU with gloo."""
    return not torch.cuda.is_available()


def device() -> torch.device:
    """The device of this rank: `cuda:LOCAL_RANK`, or the CPU."""
    if is_host():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def synchronize() -> None:
    """Wait for the device to finish, so that a clock read afterwards means something."""
    if not is_host():
        torch.cuda.synchronize()


def initialize_distributed(
    tensor_model_parallel_size: int = 1,
    timeout_seconds: float = 600,
    context_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
) -> None:
    """Start torch.distributed (torchrun's environment, or one process alone) and megatron's groups.

    May be called again with another layout; the world itself is started once.
    A collective that waits longer than `timeout_seconds` raises, so a dead rank ends the job.
    """
    from megatron.core import parallel_state

    global _timeout_seconds, _trajectory_group
    _timeout_seconds = timeout_seconds
    adapt_megatron_to_host()
    timeout = timedelta(seconds=timeout_seconds)
    if not is_host():
        check_local_rank(device().index, torch.cuda.device_count())
        torch.cuda.set_device(device())
    world = dist.get_world_size() if dist.is_initialized() else _launched_processes()
    layout = (
        tensor_model_parallel_size,
        context_parallel_size,
        pipeline_model_parallel_size,
    )
    check_layout(world, *layout)
    if not dist.is_initialized():
        _start_world(timeout)
    if parallel_state.is_initialized():
        leave_megatron_groups()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_model_parallel_size,
        context_parallel_size=context_parallel_size,
        pipeline_model_parallel_size=pipeline_model_parallel_size,
        distributed_timeout_minutes=timeout_seconds / 60,
        # There are no word embeddings to keep equal between pipeline stages.
        get_embedding_ranks=lambda ranks, *_: ranks[:1],
        get_position_embedding_ranks=lambda ranks, *_: ranks[:1],
    )
    if pipeline_model_parallel_size > 1:
        _trajectory_group = _over_stages(layout, timeout)


def _over_stages(layout: tuple[int, int, int], timeout: timedelta) -> dist.ProcessGroup:
    """The tensor, context and pipeline parallel ranks of this one; megatron leaves out context.

    It ends with megatron's groups. The first stage's ranks come first.
    """
    from megatron.core import parallel_state

    tensor, context, pipeline = layout
    data = dist.get_world_size() // (tensor * context * pipeline)
    ranks = parallel_state.RankGenerator(
        tp=tensor, ep=1, dp=data, pp=pipeline, cp=context, order="tp-cp-ep-dp-pp"
    )
    own = None
    for members in ranks.get_ranks("tp-cp-pp"):
        group = parallel_state.create_group(members, timeout=timeout)
        own = group if rank() in members else own
    assert own is not None
    return own


def timeout_seconds() -> float:
    """How long this run waits for a rank."""
    return _timeout_seconds


def check_local_rank(local_rank: int, devices: int) -> None:
    """Raise ValueError where more processes were started on a machine than it has GPUs."""
    if local_rank >= devices:
        raise ValueError(
            f"LOCAL_RANK is {local_rank}, but this machine has {devices} GPU"
            f"{'s' if devices > 1 else ''}: start at most {devices} here (--nproc-per-node)"
        )


def check_layout(
    world: int,
    tensor_model_parallel_size: int,
    context_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
) -> None:
    """Raise ValueError unless the sizes divide the number of processes."""
    processes = f"{world} process{'es' if world > 1 else ''} of this run"
    left, each = world, ""
    for setting, size in (
        (_TP_SETTING, tensor_model_parallel_size),
        (_CP_SETTING, context_parallel_size),
        (_PP_SETTING, pipeline_model_parallel_size),
    ):
        valid = [n for n in range(1, left + 1) if left % n == 0]
        if size not in valid:
            quotient = f"{each} = {left}" if left < world else ""
            raise ValueError(
                f"{setting} is {size}, which does not divide the {processes}{quotient}; "
                f"valid values: {', '.join(map(str, valid))}"
            )
        left //= size
        each += f" / {setting}" if size > 1 else ""


def _launched_processes() -> int:
    """The number of processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def _start_world(timeout: timedelta) -> None:
    backend = "gloo" if is_host() else "nccl"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
        return
    # An in-memory store needs no port, so two runs on one machine cannot meet.
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def leave_megatron_groups() -> None:
    """Forget the layout; safe without one.

    megatron only forgets its groups, each of which keeps three gloo threads that never rest.
    """
    from megatron.core import parallel_state

    global _trajectory_group
    _trajectory_group = None
    groups = getattr(parallel_state, "_global_process_group_list", None) or ()
    groups = [*groups, *_companions.values()]
    for kept in _kept_with_groups:
        kept.clear()
    parallel_state.destroy_model_parallel()
    for group in groups:
        # The list also has None for the world, and groups that this rank is not a member of.
        if group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)


_trajectory_group: dist.ProcessGroup | None = None
"""Of a pipeline; without one it is megatron's."""

_kept_with_groups: list[dict] = []


def kept_with_groups(kept: _Kept) -> _Kept:
    """A dict that is emptied when megatron's groups are left: nothing of one layout, or of one run
    in this process, is there in the next."""
    _kept_with_groups.append(kept)
    return kept


_companions: dict[tuple[dist.ProcessGroup, str], dist.ProcessGroup] = kept_with_groups({})


def companion_group(
    parent: dist.ProcessGroup, purpose: str, timeout_seconds: float
) -> dist.ProcessGroup:
    """Another communicator of the ranks of `parent`, one for each purpose.

    Made at the first call, in which every process of the world must take part with the group that
    stands for `parent` there; it ends with megatron's groups.
    """
    key = (parent, purpose)
    if key not in _companions:
        for ranks in sorted(set(_members_on_all(parent))):
            # Not by its members alone: torch then names groups by how many each rank has, and a
            # name that comes again finds the addresses of its dead namesake.
            group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_seconds))
            if rank() in ranks:
                _companions[key] = group
    return _companions[key]


def _members_on_all(group: dist.ProcessGroup) -> list[tuple[int, ...]]:
    """The members of the group that each process of the world has in this place (a collective)."""
    mine = torch.full((world_size(),), -1, dtype=torch.int64, device=device())
    ranks = dist.get_process_group_ranks(group)
    mine[: len(ranks)] = torch.tensor(ranks, device=device())
    rows = [torch.empty_like(mine) for _ in range(world_size())]
    dist.all_gather(rows, mine)
    return [tuple(r for r in row.tolist() if r >= 0) for row in rows]


def destroy_distributed() -> None:
    """Leave megatron's groups and torch.distributed; safe to call when nothing was started."""
    if not dist.is_initialized():
        return
    leave_megatron_groups()
    dist.destroy_process_group()


def rank() -> int:
    """Global rank; 0 before anything is initialised."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of processes; 1 before anything is initialised."""
    return dist.get_world_size() if dist.is_initialized() else 1


def local_world_size() -> int:
    """Processes of the run on this machine, as torchrun says; 1 without it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def smallest_over_ranks(value: int) -> int:
    """The smallest value of any rank (a collective), or this one before there are ranks."""
    if not dist.is_initialized():
        return value
    tensor = torch.tensor([value], dtype=torch.int64, device=device())
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
    return int(tensor.item())


def tp_group() -> dist.ProcessGroup | None:
    """The tensor-parallel group of this rank, or None before megatron's groups exist."""
    return _megatron_group("get_tensor_model_parallel_group")


def dp_group() -> dist.ProcessGroup | None:
    """The data-parallel group of this rank, or None before megatron's groups exist."""
    return _megatron_group("get_data_parallel_group")


def cp_group() -> dist.ProcessGroup | None:
    """The context-parallel group of this rank, or None before megatron's groups exist."""
    return _megatron_group("get_context_parallel_group")


def dp_cp_group() -> dist.ProcessGroup | None:
    """The ranks that hold the same shard of the weights, or None before megatron's groups exist."""
    return _megatron_group("get_data_parallel_group", with_context_parallel=True)


def pp_group() -> dist.ProcessGroup | None:
    """The pipeline-parallel group of this rank, or None before megatron's groups exist."""
    return _megatron_group("get_pipeline_model_parallel_group")


def stage_group() -> dist.ProcessGroup | None:
    """The ranks of one pipeline stage that work on the same trajectories."""
    return _megatron_group("get_tensor_and_context_parallel_group")


def amax_group() -> dist.ProcessGroup | None:
    """The ranks of one pipeline stage: all that have, or share, the same weights."""
    return _megatron_group("get_amax_reduction_group", with_context_parallel=True)


def trajectory_group() -> dist.ProcessGroup | None:
    """The ranks that work on the same trajectories: tensor, context and pipeline parallel.

    The first one is on the first stage.
    """
    return stage_group() if _trajectory_group is None else _trajectory_group


def _megatron_group(getter: str, **options: bool) -> dist.ProcessGroup | None:
    if not dist.is_initialized():
        return None
    from megatron.core import parallel_state

    return getattr(parallel_state, getter)(**options) if parallel_state.is_initialized() else None


def text_from_first_rank(make: Callable[[], str]) -> str:
    """What `make()` returns on rank 0, on every rank; its ValueError is raised on all.

    It travels as bytes: nothing that comes from a peer is unpickled.
    """
    text, failed = "", False
    if rank() == 0:
        try:
            text = make()
        except ValueError as error:
            text, failed = str(error), True
    if dist.is_initialized() and world_size() > 1:
        raw = text.encode("utf-8")
        header = torch.tensor([len(raw), failed], device=device())
        dist.broadcast(header, src=0)
        length, failed = header.tolist()
        buffer = torch.zeros(length, dtype=torch.uint8, device=device())
        if rank() == 0 and raw:
            buffer.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        dist.broadcast(buffer, src=0)
        text = bytes(buffer.cpu().tolist()).decode("utf-8")
    if failed:
        raise ValueError(text)
    return text


def from_last_stage(tensor: torch.Tensor) -> torch.Tensor:
    """The last pipeline stage's tensor on every stage, in place where contiguous (a collective)."""
    group = pp_group()
    if group_size(group) > 1:
        tensor = tensor.contiguous()
        dist.broadcast(tensor, src=dist.get_global_rank(group, group.size() - 1), group=group)
    return tensor


def group_size(group: dist.ProcessGroup | None) -> int:
    """Number of ranks; 1 for no group."""
    return 1 if group is None else group.size()


def group_rank(group: dist.ProcessGroup | None) -> int:
    """Our rank; 0 for no group."""
    return 0 if group is None else group.rank()


def tp_size() -> int:
    """Tensor-parallel size."""
    return group_size(tp_group())


def tp_rank() -> int:
    """Rank in the tensor-parallel group."""
    return group_rank(tp_group())


def pp_size() -> int:
    """Pipeline-parallel size: the number of stages."""
    return group_size(pp_group())


def pp_rank() -> int:
    """Rank in the pipeline-parallel group: the stage."""
    return group_rank(pp_group())


def dp_size() -> int:
    """Data-parallel size."""
    return group_size(dp_group())


def dp_rank() -> int:
    """Rank in the data-parallel group."""
    return group_rank(dp_group())


def is_logging_rank() -> bool:
    """True on the one rank that prints and writes files."""
    return rank() == 0


class _NoStream:
    """Stands for a CUDA stream where there is only one queue of work: the program itself."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


def _host_replacements() -> dict[str, Callable[..., object]]:
    cpu = torch.device("cpu")
    return {
        # The tensor-parallel mappings and DDP buffers allocate on torch.cuda.current_device().
        "current_device": lambda: cpu,
        # Parameter offload, timers and timeout updates call it unconditionally.
        "synchronize": lambda *args, **kwargs: None,
        # DDP makes a communication stream when gradients are reduced during the backward pass ...
        "Stream": _NoStream,
        # ... enters it ...
        "stream": lambda *args, **kwargs: contextlib.nullcontext(),
        # ... and orders it after the stream that computes.
        "current_stream": lambda *args, **kwargs: _NoStream(),
        "default_stream": lambda *args, **kwargs: _NoStream(),
    }


def adapt_megatron_to_host() -> None:
    """Replace the `torch.cuda` names that megatron-core calls without asking; no-op with CUDA."""
    if is_host():
        for name, replacement in _host_replacements().items():
            setattr(torch.cuda, name, replacement)


_CUDA_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.float16: "torch.cuda.HalfTensor",
}


class _CudaNamesOnHost(TorchFunctionMode):
    """Makes explicit requests for CUDA in megatron's optimizer mean the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # The optimizers and the gradient norm create scalars with device="cuda".
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs = {**kwargs, "device": torch.device("cpu")}
        # Checkpoint loading moves optimizer state with Tensor.cuda().
        if func is torch.Tensor.cuda:
            return args[0]
        # Clipping and the distributed optimizer compare Tensor.type() with torch.cuda.* names.
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return _CUDA_TYPE_NAMES.get(args[0].dtype) or func(*args)
        return func(*args, **kwargs)


@contextlib.contextmanager
def host_mode() -> Iterator[None]:
    """Wrap building and stepping megatron's optimizer and loading checkpoints; no-op with CUDA."""
    if not is_host():
        yield
        return
    adapt_megatron_to_host()
    with _CudaNamesOnHost():
        yield
