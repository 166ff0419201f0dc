#!/usr/bin/env bash
# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
# Runs the tests in the environment that quickstart.sh uses.
# Usage: bash launch/test.sh [--all] [pytest arguments]
#   --all  the slow tests too, and the linter
set -euo pipefail

# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
setup_environment

ALL=false
PYTEST_ARGS=()
for argument in "$@"; do
  if [[ "$argument" == "--all" ]]; then
    ALL=true
  else
    PYTEST_ARGS+=("$argument")
  fi
done

cd "$REPO_ROOT"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Every rank that a test starts would compile the package anew.
unset PYTHONDONTWRITEBYTECODE

if [[ "$ALL" == true ]]; then
  "$VENV_PYTHON" -m ruff check .
  "$VENV_PYTHON" -m ruff format --check .
else
  PYTEST_ARGS=(-m "not slow" "${PYTEST_ARGS[@]}")
fi
# Two files at a time: most tests keep one core busy. `-n 0` runs them in this process.
exec "$VENV_PYTHON" -m pytest -n 2 --dist loadfile "${PYTEST_ARGS[@]}"
