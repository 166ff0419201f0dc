# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced by quickstart.sh and test.sh: makes .venv in the repository root and installs the package
# into it, once. Sets REPO_ROOT and VENV_PYTHON.

REPO_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV_PYTHON="$REPO_ROOT/.venv/bin/python"

# What the tests run on. A container that brings its own torch keeps it.
TORCH_REQUIREMENT="torch==2.13.0"
EXTRAS="ocr,serve,video,parquet,test"

say() { printf '[setup] %s\n' "$*" >&2; }

die() {
  printf '[setup] error: %s\n' "$*" >&2
  exit 1
}

is_supported_python() {
  "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

has_cuda_torch() {
  { [[ -e /dev/nvidiactl ]] || command -v nvidia-smi; } >/dev/null &&
    "$1" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' >/dev/null 2>&1
}

# A Python whose torch already drives the GPUs wins, then 3.11, on which everything is tested.
find_base_python() {
  local candidate
  if is_supported_python python3 && has_cuda_torch python3; then
    command -v python3
    return
  fi
  for candidate in python3.11 python3 python3.12 python3.13; do
    if is_supported_python "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  die "no Python 3.11 or newer with the venv module was found;" \
    "install one (Debian, Ubuntu: apt-get install python3 python3-venv) and run this again"
}

pip_install() {
  "$VENV_PYTHON" -m pip install -qq --no-input --disable-pip-version-check "$@" ||
    die "pip could not install: $*; its own message is above. Run this again once it is solved"
}

create_venv() {
  local base options=()
  base="$(find_base_python)"
  if has_cuda_torch "$base"; then
    options=(--system-site-packages)
    say "[1/3] creating .venv on top of $base, whose torch sees the GPUs"
  else
    say "[1/3] creating .venv with $("$base" --version)"
  fi
  "$base" -m venv --clear "${options[@]}" "$REPO_ROOT/.venv" ||
    die "$base could not create $REPO_ROOT/.venv"
  if ((${#options[@]})); then
    # --system-site-packages skips the packages of a base that is itself a virtual environment.
    "$base" -c 'import sys, sysconfig
if sys.prefix != sys.base_prefix: print(sysconfig.get_path("purelib"))' \
      >"$("$VENV_PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base_packages.pth"
  fi
}

installed_torch() {
  "$VENV_PYTHON" -c 'import importlib.metadata; print(importlib.metadata.version("torch"))' 2>/dev/null
}

wanted_stamp() {
  "$VENV_PYTHON" - "$REPO_ROOT/setup.py" "$TORCH_REQUIREMENT" "$EXTRAS" <<'PYTHON'
import hashlib, sys
setup = open(sys.argv[1], "rb").read()
print(hashlib.sha256(setup + repr((sys.version, sys.argv[1:])).encode()).hexdigest())
PYTHON
}

install_packages() {
  local constraint="$REPO_ROOT/.venv/torch_constraint.txt"
  if ! installed_torch >/dev/null; then
    say "[2/3] installing $TORCH_REQUIREMENT"
    pip_install "$TORCH_REQUIREMENT"
  else
    say "[2/3] keeping torch $(installed_torch)"
  fi
  printf 'torch==%s\n' "$(installed_torch)" >"$constraint"
  say "[3/3] installing megatron_leangrpo with [$EXTRAS]"
  pip_install --constraint "$constraint" --editable "${REPO_ROOT}[$EXTRAS]"
}

# Does nothing when setup.py, its place, the Python and the extras are those of the last successful run.
setup_environment() {
  local stamp_file="$REPO_ROOT/.venv/installed.sha256" started=$SECONDS lock
  command -v flock >/dev/null || die "the command flock is missing (package util-linux)"
  # Two quick starts at once: the second waits here and then finds everything done.
  exec {lock}>"$REPO_ROOT/.venv.lock"
  if ! flock --nonblock "$lock"; then
    say "another run is installing into .venv; waiting for it"
    flock "$lock"
  fi
  if ! is_supported_python "$VENV_PYTHON"; then
    create_venv
  fi
  if [[ "$(cat "$stamp_file" 2>/dev/null)" != "$(wanted_stamp)" ]]; then
    install_packages
    wanted_stamp >"$stamp_file"
    say "environment ready in $((SECONDS - started)) s"
  fi
  # Closing releases the lock; a child that inherited it would hold it for the whole run.
  exec {lock}>&-
}
