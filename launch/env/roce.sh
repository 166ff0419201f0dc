# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced by launch/torchrun.sh where PRESETS names it.
# RDMA over converged Ethernet between the nodes.

# As for InfiniBand: a prefix takes mlx5_0, mlx5_1 ...
export NCCL_IB_HCA="${NCCL_IB_HCA:-mlx5}"

# RoCE v2 with an IPv4 address is entry 3 of the table on most installations (show_gids lists it);
# NCCL 2.21 and later find it by themselves, earlier ones take entry 0, which no switch routes.
export NCCL_IB_GID_INDEX="${NCCL_IB_GID_INDEX:-3}"

# The traffic class that the switches treat as lossless; ask whoever runs them. 106 is DSCP 26.
export NCCL_IB_TC="${NCCL_IB_TC:-106}"

# As for InfiniBand: longer than a switch takes to fail over.
export NCCL_IB_TIMEOUT="${NCCL_IB_TIMEOUT:-22}"
