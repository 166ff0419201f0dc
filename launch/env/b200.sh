# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced by launch/torchrun.sh where PRESETS names it.
# B200 (Blackwell) with NVLink between the GPUs of a node.

# Megatron asks for the single queue on GPUs before Blackwell only; here it would hold up streams
# that can run beside each other. As many queues as the hardware has.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-32}"
