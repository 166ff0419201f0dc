# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced by launch/torchrun.sh where PRESETS names it.
# TCP over Ethernet between the nodes: no RDMA.

# Adapters that are there but lead nowhere are not tried.
export NCCL_IB_DISABLE="${NCCL_IB_DISABLE:-1}"

# A single TCP stream fills about 20 Gb/s: several sockets a connection, with threads to serve them.
export NCCL_SOCKET_NTHREADS="${NCCL_SOCKET_NTHREADS:-4}"
export NCCL_NSOCKS_PERTHREAD="${NCCL_NSOCKS_PERTHREAD:-4}"
