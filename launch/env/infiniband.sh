# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced by launch/torchrun.sh where PRESETS names it.
# InfiniBand between the nodes, with one adapter near each GPU.

# Data-centre adapters are mlx5_0, mlx5_1 ...; a prefix takes all of them. Where storage has
# adapters of its own, list the others: NCCL_IB_HCA==mlx5_0,mlx5_1
export NCCL_IB_HCA="${NCCL_IB_HCA:-mlx5}"

# A packet is retried for 4.096 us x 2^22 = 17 s instead of 4 s before the run fails: a switch
# that fails over takes longer than the default.
export NCCL_IB_TIMEOUT="${NCCL_IB_TIMEOUT:-22}"

# Adapters reach the memory of GPUs below the same PCIe host bridge directly.
export NCCL_NET_GDR_LEVEL="${NCCL_NET_GDR_LEVEL:-PHB}"

# Which interface NCCL and gloo first meet over is found from the route to MASTER_ADDR by
# launch/torchrun.sh; set GLOO_SOCKET_IFNAME (a plain name) to choose another one.
