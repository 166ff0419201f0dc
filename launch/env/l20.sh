# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced by launch/torchrun.sh where PRESETS names it.
# L20 (Ada): PCIe alone, no NVLink.

# One queue, for the order of collectives and products, as on other GPUs before Blackwell.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"

# Direct copies between GPUs below one PCIe host bridge; across sockets host memory is faster.
export NCCL_P2P_LEVEL="${NCCL_P2P_LEVEL:-PHB}"
