# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What keeps a long run alive, or says why it is not: stopping, watching, and raising alarms."""
