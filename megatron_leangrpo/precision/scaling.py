# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The scales of delayed scaling: frozen for an iteration, renewed from the maxima it has seen.

transformer-engine renews scales after every forward. Here a rollout and the updates on it must
quantise alike, or the probability ratio would not be 1 before the first update; so an entry of the
history is an iteration, and what is in flight when, on one rank or over pipeline stages, changes
none. Maxima are those of all ranks that have a block, as with transformer-engine's `reduce_amax`
in megatron's group for it: scales do not depend on the layout.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron_leangrpo import platform
from megatron_leangrpo.precision.quantise import amax, delayed_scale_of
from megatron_leangrpo.precision.recipe import Fp8Settings


class DelayedScales(torch.nn.Module):
    """Scales and histories of a block's tensors `[slots]`, as buffers for a checkpoint.

    A block's name is that in the whole transformer, on any pipeline stage.
    """

    def __init__(self, slots: int, settings: Fp8Settings) -> None:
        super().__init__()
        self._settings = settings
        self._records = False
        self.register_buffer("amax_history", torch.zeros(settings.amax_history_len, slots))
        self.register_buffer("scale", torch.ones(slots))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Forwards inside count for the next scales; those of an evaluation do not."""
        self._records = True
        try:
            yield
        finally:
            self._records = False

    def scale_of(self, slot: int, x: torch.Tensor) -> torch.Tensor:
        """The scale of a tensor, after a look at it."""
        if self._records:
            newest = self.amax_history[0, slot]
            newest.copy_(torch.maximum(newest, amax(x.detach())))
        return self.scale[slot]

    def renew(self, newest: torch.Tensor) -> None:
        """Take the scales from the history with this entry `[slots]` and begin a new one.

        `amax_and_scale_update` (transformer-engine, common/recipe/delayed_scaling.cu).
        """
        settings, history = self._settings, self.amax_history
        history[0] = newest
        largest = newest if settings.amax_compute_algo == "most_recent" else history.amax(0)
        self.scale.copy_(
            delayed_scale_of(largest, self.scale, settings.forward_dtype, settings.margin)
        )
        self.amax_history.copy_(history.roll(-1, 0))
        self.amax_history[0] = 0


def delayed_scales(model: torch.nn.Module) -> dict[str, DelayedScales]:
    """The scales of delayed scaling of each block that is here, by name."""
    return {n: module for n, module in model.named_modules() if isinstance(module, DelayedScales)}


@contextmanager
def recording_scales(model: torch.nn.Module) -> Iterator[None]:
    """Forwards inside count for the next scales."""
    with ExitStack() as stack:
        for scales in delayed_scales(model).values():
            stack.enter_context(scales.recording())
        yield


def renew_scales(model: torch.nn.Module) -> None:
    """Begin with new scales (a collective of all ranks that have these blocks)."""
    blocks, group = list(delayed_scales(model).values()), platform.amax_group()
    if not blocks:
        return
    newest = torch.cat([scales.amax_history[0] for scales in blocks])
    if platform.group_size(group) > 1:
        dist.all_reduce(newest, op=dist.ReduceOp.MAX, group=group)
    for scales, own in zip(blocks, newest.split([len(scales.scale) for scales in blocks])):
        scales.renew(own)


def sharded_scales(model: torch.nn.Module) -> dict[str, Any]:
    """The scales for megatron's distributed checkpoints; all ranks of a stage have the same."""
    from megatron.core.utils import make_sharded_tensor_for_checkpoint

    groups = {"tp_group": platform.tp_group(), "dp_cp_group": platform.dp_cp_group()}
    return {
        f"{name}.{key}": make_sharded_tensor_for_checkpoint(buffer, f"fp8.{name}.{key}", **groups)
        for name, scales in delayed_scales(model).items()
        for key, buffer in scales.named_buffers()
    }


def load_scales(model: torch.nn.Module, loaded: dict[str, torch.Tensor]) -> None:
    """Put stored scales in place."""
    for name, scales in delayed_scales(model).items():
        for key, buffer in scales.named_buffers():
            buffer.copy_(loaded[f"{name}.{key}"])
