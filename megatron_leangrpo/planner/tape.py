# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""A block as a list of operations, and what that costs: bytes held, FLOPs, collectives.

Nothing is computed. The tape says which tensors autograd keeps and which it makes, in bytes, and
walking it backwards gives the highest point of memory, as the allocator would see it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Operation:
    """One node of the autograd graph; sizes are in bytes on one rank."""

    outputs: tuple[str, ...]
    inputs: tuple[str, ...]
    """Tensors that get a gradient."""
    saved: tuple[str, ...]
    """Tensors kept for the backward."""
    aliases: tuple[str, ...]
    """Inputs whose gradient is the output's own, or a view of it."""
    weight: int
    """Bytes of the weight gradient that the backward makes and hands over at once."""
    scratch: int
    """Bytes that the backward needs besides the gradients."""


class Tape:
    """The operations of a block in order of execution.

    Names stand for tensors. Several names may share one memory (views); each has a gradient of its
    own unless it is the same tensor under another name.
    """

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.sizes: dict[str, int] = {}
        """Bytes of each name's memory, or of its gradient where it is a view."""
        self.flops = 0.0
        """Floating-point operations of the matrix products in one forward."""
        self.sent = 0.0
        """Bytes that a rank sends in the collectives of one forward; the backward sends as many."""
        self.exchanged = 0.0
        """Those of `sent` that go to the ranks of the context."""
        self.collectives = 0
        self.weights = 0
        """Bytes of all weight gradients."""
        self._memory: dict[str, str] = {}
        """The name that owns a view's memory."""
        self._made: dict[str, int] = {}
        """Bytes of each memory that an operation makes."""
        self._kept_to_the_end: set[str] = set()

    def tensor(self, name: str, size: int) -> str:
        """Declare an input of the block, once."""
        self.sizes.setdefault(name, size)
        return name

    def add(
        self,
        name: str,
        size: int,
        inputs: Iterable[str],
        *,
        saved: Iterable[str] = (),
        aliases: Iterable[str] = (),
        keeps_output: bool = False,
        extra: int = 0,
        weight: int = 0,
        scratch: int = 0,
        flops: float = 0.0,
        sent: float = 0.0,
    ) -> str:
        """Append an operation that makes a tensor, and return the tensor's name.

        `extra` are bytes that it makes and keeps besides its output, such as statistics.
        """
        name = self._unique(name)
        self.sizes[name] = self._made[name] = size
        kept = list(dict.fromkeys(self._memory.get(x, x) for x in saved))
        if keeps_output:
            kept.append(name)
        if extra:
            self.sizes[f"{name}.extra"] = self._made[f"{name}.extra"] = extra
            kept.append(f"{name}.extra")
        self._append((name,), inputs, kept, aliases, weight, scratch)
        self.flops += flops
        self.sent += sent
        self.collectives += sent > 0
        self.weights += weight
        return name

    def split(self, base: str, parts: Mapping[str, int]) -> list[str]:
        """Views of parts of a tensor; their gradients are put together in memory of their own."""
        names = []
        for part, size in parts.items():
            name = self._unique(part)
            self.sizes[name], self._memory[name] = size, self._memory.get(base, base)
            names.append(name)
        self._append(names, [base], (), (), 0, 0)
        return names

    def keep_to_the_end(self, *names: str) -> None:
        """Say that the block's code has these at hand until it returns."""
        self._kept_to_the_end |= {self._memory.get(name, name) for name in names}

    def held(self, recomputed: bool = False) -> int:
        """Bytes that autograd keeps between forward and backward, the block's inputs included.

        Recomputed, these are the inputs alone.
        """
        saved = {name for op in self.operations for name in op.saved}
        inputs = set(self.sizes) - set(self._made) - set(self._memory)
        return sum(self.sizes[name] for name in (inputs if recomputed else saved | inputs))

    def backward_peak(self) -> int:
        """Highest bytes during the backward, of everything held and all gradients in the block."""
        walk = _Walk(self)
        for operation in reversed(self.operations):
            walk.step(operation)
        return walk.peak

    def forward_peak(self) -> int:
        """Highest bytes of a forward without gradient, the block's inputs not included."""
        last_use = dict.fromkeys(self._kept_to_the_end, len(self.operations))
        for index, operation in enumerate(self.operations):
            for name in operation.inputs:
                owner = self._memory.get(name, name)
                last_use[owner] = max(index, last_use.get(owner, 0))
        current = peak = 0
        for index, operation in enumerate(self.operations):
            current += sum(self._made.get(name, 0) for name in operation.outputs)
            peak = max(peak, current)
            gone = {owner for owner, last in last_use.items() if last == index}
            current -= sum(self._made.get(owner, 0) for owner in gone)
        return peak

    @property
    def written(self) -> int:
        """Bytes of all tensors that one forward writes."""
        return sum(self._made.values())

    def _append(self, outputs, inputs, saved, aliases, weight: int, scratch: int) -> None:
        self.operations.append(
            Operation(tuple(outputs), tuple(inputs), tuple(saved), tuple(aliases), weight, scratch)
        )

    def _unique(self, name: str) -> str:
        taken, count = name, 1
        while taken in self.sizes:
            count += 1
            taken = f"{name} {count}"
        return taken


class _Walk:
    """Memory while autograd runs a tape backwards; gradients may share a buffer."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.uses = Counter(name for op in tape.operations for name in op.saved)
        self.buffers: list[int] = []
        """Bytes of every buffer there was."""
        self.gradients: dict[str, int] = {}
        """The buffer of each tensor's gradient."""
        self.current = self.peak = tape.held()

    def step(self, operation: Operation) -> None:
        incoming = {self._incoming(name) for name in operation.outputs}
        own = {
            name: self._allocate(self.tape.sizes[name])
            for name in operation.inputs
            if name not in operation.aliases
        }
        self._raise_peak(operation.weight + operation.scratch)
        for name in operation.inputs:
            self._accumulate(name, own.get(name, min(incoming)))
        self._free((incoming | set(own.values())) - set(self.gradients.values()))
        for name in operation.saved:
            self.uses[name] -= 1
            if not self.uses[name]:
                self.current -= self.tape.sizes[name]

    def _incoming(self, output: str) -> int:
        """The gradient of an output; that of the block itself comes from outside."""
        if output in self.gradients:
            return self.gradients.pop(output)
        return self._allocate(self.tape.sizes[output])

    def _accumulate(self, name: str, buffer: int) -> None:
        before = self.gradients.get(name)
        if before is None:
            self.gradients[name] = buffer
        elif list(self.gradients.values()).count(before) > 1:
            # Autograd adds in place unless somebody else reads the first gradient too.
            self.gradients[name] = self._allocate(self.tape.sizes[name])

    def _allocate(self, size: int) -> int:
        self.buffers.append(size)
        self.current += size
        self._raise_peak()
        return len(self.buffers) - 1

    def _free(self, buffers: Iterable[int]) -> None:
        self.current -= sum(self.buffers[buffer] for buffer in buffers)

    def _raise_peak(self, extra: int = 0) -> None:
        self.peak = max(self.peak, self.current + extra)
