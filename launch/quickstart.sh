#!/usr/bin/env bash
# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
# From a bare machine to a finished run: installs into .venv, then trains the tiny FLUX.
# Usage: bash launch/quickstart.sh [--section.key=value ...]
set -euo pipefail

# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
setup_environment

# Two single-threaded ranks are about twice as fast as one rank with two threads on two cores, and
# threads that share a core with another job are many times slower.
RANKS=2
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
if has_cuda_torch "$VENV_PYTHON"; then
  RANKS="$("$VENV_PYTHON" -c 'import torch; print(torch.cuda.device_count())')"
fi

LAUNCHER=(
  "$VENV_PYTHON" "$REPO_ROOT/launch/run_ranks.py"
  --standalone
  --nproc-per-node "$RANKS"
)
exec "${LAUNCHER[@]}" -m megatron_leangrpo train flux_tiny "$@"
