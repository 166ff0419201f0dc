# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What is installed, which devices there are, and what is optional, missing and how to get it.

Nothing heavy is imported: versions come from package metadata, GPUs from nvidia-smi.
"""

import functools
import importlib.metadata
import importlib.util
import os
import platform
import runpy
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REQUIRED = (
    "torch",
    "megatron-core",
    "diffusers",
    "transformers",
    "accelerate",
    "sentencepiece",
    "ftfy",
    "safetensors",
    "numpy",
    "jsonargparse",
    "rich",
    "tensorboard",
    "matplotlib",
    "pillow",
    "psutil",
)


@dataclass(frozen=True)
class OptionalPackage:
    """A package that one feature needs."""

    package: str
    module: str
    purpose: str
    how_to_get: str


def _extra(name: str) -> str:
    return f"pip install 'megatron-leangrpo[{name}]'"


OPTIONAL = (
    OptionalPackage(
        "transformer-engine", "transformer_engine", "FP8 and fused layers", _extra("gpu")
    ),
    OptionalPackage(
        "apex",
        "amp_C",
        "fused optimizer steps and gradient accumulation on GPUs without transformer-engine",
        "part of NVIDIA's PyTorch containers, or built from its source",
    ),
    OptionalPackage("rapidocr", "rapidocr", "the OCR rewards", _extra("ocr")),
    OptionalPackage("onnxruntime", "onnxruntime", "the OCR rewards", _extra("ocr")),
    OptionalPackage("fastapi", "fastapi", "leangrpo serve-reward", _extra("serve")),
    OptionalPackage("uvicorn", "uvicorn", "leangrpo serve-reward", _extra("serve")),
    OptionalPackage("httpx", "httpx", "rewards of a reward server", _extra("serve")),
    OptionalPackage("tenacity", "tenacity", "rewards of a reward server", _extra("serve")),
    OptionalPackage("av", "av", "MP4 files of video samples", _extra("video")),
    OptionalPackage("pyarrow", "pyarrow", "prompt files in parquet", _extra("parquet")),
    OptionalPackage("wandb", "wandb", "logging to Weights & Biases", _extra("wandb")),
    OptionalPackage("peft", "peft", "tests of exported LoRA adapters", _extra("test")),
)


@dataclass(frozen=True)
class FusedKernel:
    """What a GPU container may bring a kernel for, and what computes it."""

    work: str
    modules: tuple[tuple[str, str], ...]
    """Package and module that brings the kernel, in the order in which they are looked for."""
    otherwise: str
    unused: str | None = None
    """Why the kernel is not used where it is there; None where it is."""


_TRANSFORMER_ENGINE = ("transformer-engine", "transformer_engine")
FUSED_KERNELS = (
    # The first two are megatron-core's choice, when it is imported.
    FusedKernel("Adam", (_TRANSFORMER_ENGINE, ("apex", "apex")), "torch's AdamW"),
    FusedKernel("gradient norm", (_TRANSFORMER_ENGINE, ("apex", "amp_C")), "megatron's own sums"),
    FusedKernel(
        "weight gradients",
        (("apex", "fused_weight_gradient_mlp_cuda"), _TRANSFORMER_ENGINE),
        "torch's products, added in place",
    ),
    FusedKernel("layer norms", (("apex", "apex"),), "torch's layer norm"),
    FusedKernel(
        "RMS norms",
        (_TRANSFORMER_ENGINE, ("apex", "apex")),
        "ours, with the rotation",
        unused="it has one weight, and ours takes queries and keys, over the ranks too",
    ),
)


def collect_info() -> dict[str, Any]:
    """Return versions, devices, the backend and the optional packages as plain data."""
    gpus = gpu_lines()
    cuda_build = _torch_cuda_build()
    return {
        "versions": {
            "megatron-leangrpo": version_of("megatron-leangrpo"),
            "python": platform.python_version(),
            **{name: version_of(name) for name in REQUIRED},
        },
        "system": platform.platform(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": gpus,
        "torch_cuda": cuda_build,
        "backend": "cuda (nccl)" if gpus and cuda_build else "cpu (gloo)",
        "optional": [
            {
                "package": item.package,
                "version": _optional_version(item),
                "for": item.purpose,
                "get": item.how_to_get,
            }
            for item in OPTIONAL
        ],
        "fused_kernels": [_fused(kernel) for kernel in FUSED_KERNELS],
    }


def print_info() -> None:
    """Print `collect_info` for a person."""
    info = collect_info()
    for name, version in info["versions"].items():
        print(f"{name:18} {version or 'MISSING'}")
    print(f"\n{'system':18} {info['system']}")
    print(f"{'cpu':18} {info['cpu_cores']} cores, {info['memory_bytes'] / 2**30:.0f} GiB of memory")
    for index, gpu in enumerate(info["gpus"]):
        print(f"{f'gpu {index}':18} {gpu}")
    print(f"{'backend':18} {_explain_backend(info)}")
    print("\noptional")
    for item in info["optional"]:
        print(f"  {item['package']:18} {item['version'] or 'missing':9} {item['for']}")
        if not item["version"]:
            print(f"{'':31}get it: {item['get']}")
    print("\nfused kernels")
    for kernel in info["fused_kernels"]:
        print(f"  {kernel['work']:18} {_explain_fused(kernel)}")


def _explain_backend(info: dict[str, Any]) -> str:
    if info["gpus"] and not info["torch_cuda"]:
        return f"{info['backend']}: there are GPUs, but this torch is built without CUDA"
    if not info["gpus"]:
        return f"{info['backend']}: no NVIDIA GPU found"
    return info["backend"]


def _fused(kernel: FusedKernel) -> dict[str, Any]:
    """Which kernel is there and what is in use; kernels need a GPU."""
    found = next((p for p, module in kernel.modules if importlib.util.find_spec(module)), None)
    unused = kernel.unused
    if found is None:
        unused = "no fused kernel here"
    elif not gpu_lines():
        unused = "no GPU"
    return {
        "work": kernel.work,
        "present": found,
        "in_use": kernel.otherwise if unused else found,
        "why_not": unused,
    }


def _explain_fused(kernel: dict[str, Any]) -> str:
    if kernel["why_not"] is None:
        return f"{kernel['in_use']}"
    if kernel["present"] is None:
        return f"{kernel['in_use']} ({kernel['why_not']})"
    return f"{kernel['in_use']} ({kernel['present']}'s kernel is not used: {kernel['why_not']})"


def version_of(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _optional_version(item: OptionalPackage) -> str | None:
    if importlib.util.find_spec(item.module) is None:
        return None
    return version_of(item.package) or "installed"


def _torch_cuda_build() -> str | None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    return runpy.run_path(str(Path(spec.origin).with_name("version.py"))).get("cuda")


@functools.cache
def gpu_lines() -> list[str]:
    """Name, memory and driver of each GPU, a line each, as nvidia-smi says."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = [
        "nvidia-smi",
        "--query-gpu=name,memory.total,driver_version",
        "--format=csv,noheader",
    ]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in result.stdout.splitlines() if line.strip()]
