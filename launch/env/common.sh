# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced by launch/torchrun.sh where PRESETS names it.
# For every GPU run: what torch and CUDA should do whatever the cluster.

# Memory segments that grow in place: a rollout and an update want blocks of different sizes, and
# fixed segments would leave holes between them.
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"
# torch before 2.9 knows the same setting under this name.
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-$PYTORCH_ALLOC_CONF}"

# A communicator whose peer has gone is torn down and the rank ends, instead of waiting for ever.
export TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}"

# The last collectives of every rank are kept and written when one times out: they say which rank
# was late, and where.
export TORCH_NCCL_TRACE_BUFFER_SIZE="${TORCH_NCCL_TRACE_BUFFER_SIZE:-2000}"
export TORCH_NCCL_DUMP_ON_TIMEOUT="${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}"

# Kernels are loaded when first used, which saves device memory and seconds at the start.
export CUDA_MODULE_LOADING="${CUDA_MODULE_LOADING:-LAZY}"

# One line with the version, and problems; INFO prints pages for each rank.
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
