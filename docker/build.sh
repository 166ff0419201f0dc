#!/usr/bin/env bash
# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
# Builds the image: bash docker/build.sh gpu|cpu [docker build arguments]
# Settings, all from the environment:
#   REGISTRY     what stands in front of the base image's name, NVIDIA's registry for gpu (needed
#                there; for cpu the engine's default is used where it is not set)
#   BASE_IMAGE   the whole name instead, for a mirror or another tag
#   IMAGE        name and tag of what is built (default megatron-leangrpo[-cpu]:VERSION)
#   TORCH_INDEX  cpu: a package index with torch built without CUDA (default: the usual one)
#   ENGINE       docker or podman (default docker)
set -euo pipefail

REPO_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=docker/versions.env
source "$REPO_ROOT/docker/versions.env"

die() {
  printf 'build: error: %s\n' "$*" >&2
  exit 2
}

KIND="${1:-}"
VERSION="$(sed -n 's/^ *version="\(.*\)",$/\1/p' "$REPO_ROOT/setup.py")"
case "$KIND" in
  gpu)
    [[ -n "${BASE_IMAGE:-}${REGISTRY:-}" ]] ||
      die "set REGISTRY to the registry of $GPU_IMAGE:$GPU_TAG (NVIDIA's, or your mirror of it)"
    BASE_IMAGE="${BASE_IMAGE:-$REGISTRY/$GPU_IMAGE:$GPU_TAG}"
    IMAGE="${IMAGE:-megatron-leangrpo:$VERSION}"
    BUILD_ARGS=(--file "$REPO_ROOT/docker/Dockerfile")
    ;;
  cpu)
    BASE_IMAGE="${BASE_IMAGE:-${REGISTRY:+$REGISTRY/}$CPU_IMAGE:$CPU_TAG}"
    IMAGE="${IMAGE:-megatron-leangrpo-cpu:$VERSION}"
    BUILD_ARGS=(
      --file "$REPO_ROOT/docker/Dockerfile.cpu"
      --build-arg "CPU_TORCH=$CPU_TORCH"
      --build-arg "TORCH_INDEX=${TORCH_INDEX:-}"
    )
    ;;
  *) die "usage: bash docker/build.sh gpu|cpu [docker build arguments]" ;;
esac

ENGINE="${ENGINE:-docker}"
command -v "$ENGINE" >/dev/null || die "ENGINE = $ENGINE is not installed; valid: docker, podman"

exec "$ENGINE" build \
  "${BUILD_ARGS[@]}" \
  --build-arg "BASE_IMAGE=$BASE_IMAGE" \
  --tag "$IMAGE" \
  "${@:2}" \
  "$REPO_ROOT"
