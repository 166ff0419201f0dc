# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
