# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Two transformers that take turns by noise level, as one module (Wan 2.2 A14B)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from megatron_leangrpo.models.common.conversion import Renamed, TensorInfo, TensorSource
from megatron_leangrpo.models.common.weights import Rule
from megatron_leangrpo.pipeline.stages import Stage
from megatron_leangrpo.pipeline.transport import Boundary

NAMES = ("high", "low")
"""The experts from high to low noise: prefixes of parameter names, suffixes of metrics."""


class Experts(torch.nn.Module):
    """The expert for high noise where the timestep is at least `boundary`, else that for low.

    With `offload` the idle one's weights may be in host memory: see `idle_in_host`.
    """

    def __init__(
        self, high: torch.nn.Module, low: torch.nn.Module, boundary: float, offload: bool = False
    ) -> None:
        super().__init__()
        self.high, self.low, self.noise_boundary, self.offload = high, low, boundary, offload
        self._weights = {high: WeightsInHost(high), low: WeightsInHost(low)}
        self._swaps = False

    def forward(self, latents: torch.Tensor, timestep: torch.Tensor, *inputs: Any, **named: Any):
        """What the expert for `timestep` returns; all rows of a batch belong to one expert."""
        used, idle = self._on_device_for(timestep)
        velocity = used(latents, timestep, *inputs, **named)
        self._need_in_backward((velocity,), used, idle)
        return velocity

    def run_stage(
        self, state: Sequence[torch.Tensor], timestep: torch.Tensor, *inputs: Any
    ) -> tuple[torch.Tensor, ...]:
        """What a stage of the expert for `timestep` returns."""
        used, idle = self._on_device_for(timestep)
        outputs = used.run_stage(state, timestep, *inputs)
        self._need_in_backward(outputs, used, idle)
        return outputs

    @property
    def stage(self) -> Stage:
        """Both experts are cut alike."""
        return self.high.stage

    def boundary(self, *inputs: Any, **options: bool) -> Boundary:
        """What a stage of either expert hands to the next one."""
        return self.high.boundary(*inputs, **options)

    def received(self, *inputs: Any, **options: bool) -> Boundary:
        """What a stage of either expert gets from the one before it."""
        return self.high.received(*inputs, **options)

    def _on_device_for(self, timestep: torch.Tensor) -> tuple[torch.nn.Module, torch.nn.Module]:
        """The expert for a noise level and the idle one."""
        is_high = runs_high(timestep, self.noise_boundary)
        used, idle = (self.high, self.low) if is_high else (self.low, self.high)
        self._put_on_device(used, idle)
        return used, idle

    def _need_in_backward(
        self, outputs: Sequence[torch.Tensor], used: torch.nn.Module, idle: torch.nn.Module
    ) -> None:
        """Have a backward bring the weights back before it enters the expert.

        Of several outputs any may be the first to be gone back from.
        """
        for output in outputs:
            if self._swaps and output.grad_fn is not None:
                output.register_hook(lambda gradient: self._put_on_device(used, idle))

    def _put_on_device(self, used: torch.nn.Module, idle: torch.nn.Module) -> None:
        if self._swaps:
            self._weights[idle].stow()
            self._weights[used].fetch()

    @contextmanager
    def swapping(self) -> Iterator[None]:
        """Keep the idle expert's weights in host memory for the time of the context."""
        self._swaps = self.offload
        try:
            yield
        finally:
            self._swaps = False
            for weights in self._weights.values():
                weights.fetch()


def idle_in_host(model: torch.nn.Module) -> AbstractContextManager[None]:
    """A context of forwards and backwards in which a policy's idle expert may leave the device."""
    return model.swapping() if isinstance(model, Experts) else nullcontext()


class WeightsInHost:
    """Moves a module's weights to host memory and back.

    The storages stay and lose their memory, so that megatron's buffers, of which the weights are
    views, and graphs that hold the weights are none the wiser.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._copies: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []

    def stow(self) -> None:
        """Move the weights, unless they have been."""
        if self._copies:
            return
        storages = (p.data.untyped_storage() for p in self._module.parameters())
        for storage in {storage.data_ptr(): storage for storage in storages}.values():
            copy = torch.UntypedStorage(storage.nbytes())
            if storage.device.type == "cuda":
                copy = copy.pin_memory()
            copy.copy_(storage)
            storage.resize_(0)
            self._copies.append((storage, copy))

    def fetch(self) -> None:
        """Put the weights back where they were."""
        for storage, copy in self._copies:
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
        self._copies.clear()


def runs_high(timestep: torch.Tensor, boundary: float) -> bool:
    """Whether a batch belongs to the expert for high noise."""
    high = timestep >= boundary
    assert bool(high.all() == high.any()), "a batch mixes the noise levels of two experts"
    return bool(high.any())


def transformers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The transformers that a policy's model consists of, high noise first."""
    return [model.high, model.low] if isinstance(model, Experts) else [model]


def rules_of_experts(rules: Sequence[Rule], folders: Sequence[str]) -> list[Rule]:
    """The table of both experts' weights: ours by expert, theirs by folder of the pipeline."""
    return [
        Rule(
            tuple(f"{expert}.{name}" for name in rule.ours),
            tuple(f"{folder}.{name}" for name in rule.theirs),
            rule.to_ours,
            rule.to_theirs,
        )
        for expert, folder in zip(NAMES, folders, strict=True)
        for rule in rules
    ]


class InFolders(TensorSource):
    """Tensors of several folders under `folder.name`, each read when it is asked for."""

    def __init__(self, folders: Mapping[str, TensorSource]) -> None:
        self._folders = folders
        self._layout = {
            f"{folder}.{name}": info
            for folder, tensors in folders.items()
            for name, info in tensors.layout.items()
        }

    @property
    def layout(self) -> Mapping[str, TensorInfo]:
        """Shape and dtype of every tensor."""
        return self._layout

    def __getitem__(self, name: str) -> torch.Tensor:
        folder, _, tensor = name.partition(".")
        return self._folders[folder][tensor]


def of_one(tensors: TensorSource, prefix: str) -> TensorSource:
    """The tensors under `prefix.name`, an expert's or a folder's, by their names alone."""
    names = [name for name in tensors if name.startswith(f"{prefix}.")]
    return Renamed(tensors, {name.removeprefix(f"{prefix}."): name for name in names})
