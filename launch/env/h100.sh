# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced by launch/torchrun.sh where PRESETS names it.
# H100 (Hopper) with NVLink between the GPUs of a node.

# One queue from host to device: kernels start in the order they were given, so that a collective
# issued before a matrix product gets its multiprocessors first. Tensor parallelism's overlap
# depends on that order on GPUs before Blackwell.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"

# Reductions inside the NVLink switch (NVLS) speed up large all-reduces, but take 1 to 2 GiB of each
# GPU, which retain needs for activations. Set 1 where memory is plenty.
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}"
