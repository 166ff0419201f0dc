# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Stops a run at the first number that is none, and says where it came up."""

from collections.abc import Sequence

import torch


class NotFiniteError(RuntimeError):
    """A tensor holds NaN or Inf; the message says which, and where."""


def check_steps(
    finite: torch.Tensor, tensors: Sequence[str], samples: Sequence[str], where: str
) -> None:
    """Raise `NotFiniteError` for the first step of a rollout with a number that is none.

    `where` names the rollout. `finite` is `[steps, tensors, samples]` bool. One wait for the
    device for the whole rollout.
    """
    if bool(finite.all()):
        return
    for step, flags in enumerate(finite.tolist(), start=1):
        for name, good in zip(tensors, flags, strict=True):
            wrong = [sample for sample, fine in zip(samples, good, strict=True) if not fine]
            if wrong:
                raise NotFiniteError(
                    f"{name} of {_some(wrong)} is not finite in step {step} of {len(finite)} of "
                    f"{where}"
                )


def check_gradients(model: torch.nn.Module, iteration: int) -> None:
    """Raise `NotFiniteError` with the parameters whose gradient is not finite, before a step.

    megatron's gradients are in `main_grad`, those of plain modules in `grad`.
    """
    grads = {name: _gradient(parameter) for name, parameter in model.named_parameters()}
    grads = {name: value for name, value in grads.items() if value is not None}
    if not grads:
        return
    # An expert that is not in use may be in host memory.
    device = next(iter(grads.values())).device
    sums = torch.stack([value.sum(dtype=torch.float64).to(device) for value in grads.values()])
    if bool(sums.isfinite().all()):
        return
    wrong = [name for name, value in grads.items() if not bool(value.isfinite().all())]
    if wrong:
        raise NotFiniteError(
            f"the gradient of {_some(wrong)} is not finite in iteration {iteration}: "
            f"{_count(grads[wrong[0]])} in the first; no optimizer step was taken"
        )


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    main_grad = getattr(parameter, "main_grad", None)
    return parameter.grad if main_grad is None else main_grad


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _count(value: torch.Tensor) -> str:
    nans, infs = int(value.isnan().sum()), int(value.isinf().sum())
    return f"{nans} NaN and {infs} Inf of {value.numel()} numbers"
