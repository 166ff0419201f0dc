# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The float64 reference numbers, and how a step case maps to this package's names."""

import json
from pathlib import Path

import torch
from torch import Tensor

from megatron_leangrpo.diffusion.kernels import StepCoefficients, step_coefficients
from megatron_leangrpo.diffusion.sigmas import SigmaSchedule, build_sigma_schedule

VECTORS = json.loads((Path(__file__).parent / "sde_vectors.json").read_text())
STEPS = {case["id"]: case for case in VECTORS["steps"]}
KERNEL_NAMES = {"wan_flowgrpo": "wan_sde"}


def tensor(values, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).to(dtype)


def kernel_of(case: dict) -> tuple[str, float | None]:
    kernel = KERNEL_NAMES.get(case["dynamics"], case["dynamics"])
    return kernel, None if kernel in ("wan_sde", "ode") else case["level"]


def schedule_of(case: dict) -> SigmaSchedule:
    name = case["id"]
    if "unipc3" in name:
        return build_sigma_schedule("unipc_flow", case["num_steps"], shift=3.0)
    if "shift" in name:
        shift = 5.0 if "shift5" in name else 3.0
        return build_sigma_schedule("static_shift", case["num_steps"], shift=shift)
    return build_sigma_schedule("flux_dynamic", case["num_steps"], image_tokens=1024)


def coefficients_of(case: dict) -> StepCoefficients:
    return step_coefficients(*kernel_of(case), schedule_of(case).sigmas, case["step_index"])
