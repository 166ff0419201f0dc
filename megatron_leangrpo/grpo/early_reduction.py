# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Gradients summed over data-parallel ranks beside the last backward of an update."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from megatron_leangrpo import platform


class EarlyReduction:
    """Starts a bucket's reduction as soon as an update's last backward is through with it.

    megatron's own overlap counts backwards and starts buckets in the order in which they finish.
    Here backwards differ in number between updates, and which step comes last differs between
    ranks: buckets start in the wrapper's order on all of them, and those that have not started
    when the update ends start then.

    Args:
        wrapper: megatron's data-parallel wrapper, made with `overlap_grad_reduce`.
    """

    def __init__(self, wrapper: torch.nn.Module) -> None:
        self._groups = wrapper.bucket_groups
        self._missing: list[set[torch.nn.Parameter]] = []
        """Of each bucket that has not started, the parameters that the backward has yet to reach;
        empty outside the last backward."""
        trained = [p for p in wrapper.module.parameters() if p.requires_grad]
        for parameter, accumulator in zip(trained, wrapper.grad_accs, strict=True):
            # After megatron's hook, which adds the gradient to the bucket.
            accumulator.register_hook(partial(self._passed, parameter))

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """Around the last backward of an update, after which nothing is added to the buckets."""
        self._missing = [set(group.params) for group in self._groups]
        try:
            yield
        finally:
            self._missing = []

    def _passed(self, parameter: torch.nn.Parameter, *_: object) -> None:
        for missing in self._missing:
            missing.discard(parameter)
        while self._missing and not self._missing[0]:
            group = self._groups[len(self._groups) - len(self._missing)]
            with platform.host_mode():
                group.start_grad_sync()
            self._missing.pop(0)
