#!/usr/bin/env bash
# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
# Trains a recipe on one node, or as one of several nodes that are all started like this.
# Usage: bash launch/torchrun.sh RECIPE [--section.key=value ...]
#        NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 GPUS_PER_NODE=8 PRESETS="h100 infiniband" \
#          bash launch/torchrun.sh flux_dev_dancegrpo --output=/shared/run1
# Settings, all from the environment (what Kubeflow sets as PET_* is used where these are not set):
#   NNODES          nodes, or MIN:MAX for a run that goes on with fewer (default 1)
#   NODE_RANK       0 on the node MASTER_ADDR names, the others in any order
#   MASTER_ADDR     address of node 0 in the network of the nodes
#   MASTER_PORT     a free port there (default 29500); one node alone needs none
#   GPUS_PER_NODE   ranks on this node (default: the GPUs torch sees, 1 without any)
#   PRESETS         names of files in launch/env, read in this order
#   MAX_RESTARTS    how often ranks are started again after a failure (default 0, several nodes: 3)
#   RUN_ID          tells runs that meet at one address apart (default: made of the arguments)
#   JOIN_TIMEOUT    seconds to wait for the other nodes (default 600)
#   PREFLIGHT       0 leaves out the checks before a run of several nodes
#   COMMAND         train, compare or evaluate (default train)
#   PYTHON          interpreter (default: .venv/bin/python here, or python3)
set -euo pipefail

REPO_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

die() {
  printf 'leangrpo: error: %s\n' "$*" >&2
  exit 2
}

whole_number() {
  if [[ ! "$2" =~ ^[0-9]+$ ]] || ((10#$2 < $3)); then
    die "$1 = $2; valid: a whole number from $3"
  fi
}

if (($# == 0)) || [[ "$1" == -* ]]; then
  die "usage: bash launch/torchrun.sh RECIPE [--section.key=value ...]"
fi

if [[ -z "${PYTHON:-}" ]]; then
  PYTHON="$REPO_ROOT/.venv/bin/python"
  [[ -x "$PYTHON" ]] || PYTHON=python3
fi

for preset in ${PRESETS:-}; do
  file="$REPO_ROOT/launch/env/$preset.sh"
  if [[ ! -f "$file" ]]; then
    known="$(cd "$REPO_ROOT/launch/env" && printf '%s ' *.sh)"
    die "PRESETS: there is no preset $preset; valid: ${known//.sh/}"
  fi
  # shellcheck source=/dev/null
  source "$file"
done

NNODES="${NNODES:-${PET_NNODES:-1}}"
GPUS_PER_NODE="${GPUS_PER_NODE:-${PET_NPROC_PER_NODE:-}}"
COMMAND="${COMMAND:-train}"
[[ "$NNODES" =~ ^[1-9][0-9]*(:[1-9][0-9]*)?$ ]] ||
  die "NNODES = $NNODES; valid: a number of nodes, or MIN:MAX"
((${NNODES%%:*} <= ${NNODES##*:})) || die "NNODES = $NNODES; valid: MIN:MAX with MIN <= MAX"

if [[ ! "$GPUS_PER_NODE" =~ ^[0-9]+$ ]]; then
  # Kubeflow says "gpu", "auto" or "cpu" where a runtime leaves it open.
  [[ "$GPUS_PER_NODE" =~ ^(|gpu|auto|cpu)$ ]] ||
    die "GPUS_PER_NODE = $GPUS_PER_NODE; valid: a whole number from 1"
  GPUS_PER_NODE="$("$PYTHON" -c 'import torch; print(torch.cuda.device_count() or 1)')"
fi
whole_number GPUS_PER_NODE "$GPUS_PER_NODE" 1

# Ranks that share cores are many times slower with threads of their own.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# torch's sockets warn about addresses without a name, which is nobody's concern.
export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}"

if [[ "$NNODES" == 1 ]]; then
  # The system chooses a free port, so that runs on one machine never meet.
  DISTRIBUTED_ARGS=(
    --standalone
    --nproc-per-node "$GPUS_PER_NODE"
    --max-restarts "${MAX_RESTARTS:-0}"
  )
else
  NODE_RANK="${NODE_RANK:-${PET_NODE_RANK:-}}"
  MASTER_ADDR="${MASTER_ADDR:-${PET_MASTER_ADDR:-}}"
  MASTER_PORT="${MASTER_PORT:-${PET_MASTER_PORT:-29500}}"
  [[ -n "$NODE_RANK" ]] || die "NODE_RANK is not set; with NNODES = $NNODES every node needs its own"
  [[ -n "$MASTER_ADDR" ]] || die "MASTER_ADDR is not set; give the address of node 0"
  whole_number NODE_RANK "$NODE_RANK" 0
  ((10#$NODE_RANK < ${NNODES##*:})) ||
    die "NODE_RANK = $NODE_RANK; valid with NNODES = $NNODES: 0 to $((${NNODES##*:} - 1))"
  whole_number MASTER_PORT "$MASTER_PORT" 1
  found="$("$PYTHON" "$REPO_ROOT/launch/network.py" "$MASTER_ADDR" "$MASTER_PORT" "$NODE_RANK")" ||
    exit 2
  read -r interface address <<<"$found"
  export GLOO_SOCKET_IFNAME="$interface"
  # A store for each round of ranks: the one that rounds would share keeps the addresses of ranks
  # that have died, and the first rank may move to another node.
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
  # NCCL would take a prefix; = makes it that interface and no other.
  export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-=$interface}"
  if [[ -z "${RUN_ID:-}" ]]; then
    RUN_ID="$(printf '%s ' "$@" | cksum)"
    RUN_ID="leangrpo-${RUN_ID%% *}"
  fi
  is_host=false
  ((10#$NODE_RANK == 0)) && is_host=true
  DISTRIBUTED_ARGS=(
    --nnodes "$NNODES"
    --nproc-per-node "$GPUS_PER_NODE"
    --rdzv-backend c10d
    --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT"
    --rdzv-id "$RUN_ID"
    --rdzv-conf "is_host=$is_host,join_timeout=${JOIN_TIMEOUT:-600}"
    --local-addr "$address"
    --max-restarts "${MAX_RESTARTS:-3}"
  )
fi

PROGRAM=(-m megatron_leangrpo "$COMMAND")
if [[ "$NNODES" != 1 && "${PREFLIGHT:-1}" != 0 ]]; then
  # In the ranks of the run itself: after a restart the nodes that have come anew are checked, too.
  PROGRAM=("$REPO_ROOT/launch/preflight.py" --then "$COMMAND")
fi

TRAINING_ARGS=("$@")
if ((${MAX_RESTARTS:-3} > 0)) && [[ "$NNODES" != 1 && "$COMMAND" == train ]]; then
  # First, so that what the user says wins.
  TRAINING_ARGS=("$1" --checkpoint.resume=auto "${@:2}")
fi

exec "$PYTHON" "$REPO_ROOT/launch/run_ranks.py" \
  "${DISTRIBUTED_ARGS[@]}" \
  "${PROGRAM[@]}" \
  "${TRAINING_ARGS[@]}"
