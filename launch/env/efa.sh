# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced by launch/torchrun.sh where PRESETS names it.
# AWS Elastic Fabric Adapter; needs the aws-ofi-nccl plugin in the image.

# The fabric's provider by name: libfabric would fall back to TCP without a word where the plugin
# or the devices are missing; so it fails.
export FI_PROVIDER="${FI_PROVIDER:-efa}"

# GPU memory is read and written by the adapters directly; implied by recent plugins, needed by
# older ones on p4d.
export FI_EFA_USE_DEVICE_RDMA="${FI_EFA_USE_DEVICE_RDMA:-1}"

# Huge pages make fork fail with "Cannot allocate memory" once they run out; the checkpoint writer
# forks.
export FI_EFA_USE_HUGE_PAGE="${FI_EFA_USE_HUGE_PAGE:-0}"

# The plugin tunes algorithms and protocols for each instance type itself: NCCL_ALGO and NCCL_PROTO
# stay unset.
