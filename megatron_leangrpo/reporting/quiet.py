# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Keeps the notices of libraries, which a user can do nothing about, out of a run's output."""

import logging
import os
import warnings

_ENVIRONMENT = {
    # "CLIPImageProcessor requires torchvision": no image processor is ever used.
    "TRANSFORMERS_VERBOSITY": "error",
    "DIFFUSERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    # The tokenizers warn when a process that used them forks.
    "TOKENIZERS_PARALLELISM": "false",
    # The profiler that counts memory announces its start and stop, and torch's CPU allocator that
    # it was not told of what was allocated before.
    "KINETO_LOG_LEVEL": "99",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}

_WARNINGS = (
    # megatron-core, at import, in each of four modules; `leangrpo info` says it once.
    "Transformer Engine and Apex are not installed",
    # megatron-core, about a default of its own.
    "full scope is deprecated",
    # megatron-core 0.16 on a host: a CUDA variable, and torch's older names of collectives.
    "When using async grad allreduce",
    "`torch.distributed.(all_gather_into|reduce_scatter)_tensor` is deprecated",
    # megatron-core's checkpoint reader.
    "`load_state_dict` is deprecated",
)

_LOGGERS = ("megatron", "RapidOCR", "rapidocr", "matplotlib", "PIL", "absl", "tensorboard")


def quiet_libraries() -> None:
    """Call on every rank before the first heavy import; a user's own settings are kept."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for message in _WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
