# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Muon (Keller Jordan, 2024) in float32: torch's works in bfloat16, ten times slower on CPUs."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

# Quintic Newton-Schulz coefficients of the published optimizer.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def orthogonalize(matrix: Tensor) -> Tensor:
    """The matrix with all its singular values pushed towards 1."""
    a, b, c = COEFFICIENTS
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = wide / wide.norm().clamp_min(1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, at the root-mean-square size of an AdamW update."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        """Update every weight that has a gradient; convolutions count as [out, rest] matrices."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                average = self.state[parameter].get("average", torch.zeros_like(parameter))
                average = average.lerp(parameter.grad, 1 - group["momentum"])
                self.state[parameter]["average"] = average
                direction = parameter.grad.lerp(average, group["momentum"]).flatten(1)
                size = 0.2 * max(direction.shape) ** 0.5
                update = orthogonalize(direction).view_as(parameter)
                parameter.add_(update, alpha=-group["lr"] * size)
