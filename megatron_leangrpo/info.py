# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What is installed, which devices there are, and what is optional, missing and how to get it.

Nothing heavy is imported: versions come from package metadata, GPUs from nvidia-smi.
"""

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
    OptionalPackage("wandb", "wandb", "logging to Weights & Biases", _extra("wandb")),
    OptionalPackage("peft", "peft", "tests of exported LoRA adapters", _extra("test")),
)


def collect_info() -> dict[str, Any]:
    """Return versions, devices, the backend and the optional packages as plain data."""
    gpus = _gpus()
    cuda_build = _torch_cuda_build()
    return {
        "versions": {
            "megatron-leangrpo": _version("megatron-leangrpo"),
            "python": platform.python_version(),
            **{name: _version(name) for name in REQUIRED},
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


def _explain_backend(info: dict[str, Any]) -> str:
    if info["gpus"] and not info["torch_cuda"]:
        return f"{info['backend']}: there are GPUs, but this torch is built without CUDA"
    if not info["gpus"]:
        return f"{info['backend']}: no NVIDIA GPU found"
    return info["backend"]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _optional_version(item: OptionalPackage) -> str | None:
    if importlib.util.find_spec(item.module) is None:
        return None
    return _version(item.package) or "installed"


def _torch_cuda_build() -> str | None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    return runpy.run_path(str(Path(spec.origin).with_name("version.py"))).get("cuda")


def _gpus() -> list[str]:
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
