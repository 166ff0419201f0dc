#!/usr/bin/env bash
# Compares the schedules on this machine's GPU, in bfloat16 at FLUX.1-dev's width: gradient error,
# seconds, peak memory and the error of the planner's memory model. Without a GPU the same code runs
# tiny shapes on the CPU.
# Needs no network: wheels that the machine lacks are taken from .whl/ beside the repository's files.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
out=${OUT:-/tmp}

if compgen -G ".whl/*.whl" >/dev/null; then
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade \
    --target /tmp/leangrpo-site .whl/*.whl
  export PYTHONPATH=/tmp/leangrpo-site${PYTHONPATH:+:$PYTHONPATH}
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} CUDA_DEVICE_MAX_CONNECTIONS=1

shapes=()
if ! "$python" -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
  echo "no CUDA device: tiny shapes on the CPU"
  shapes=(--model.preset=flux_bench --model.dtype=float32 --sampling.height=64 --sampling.width=64 --model.max_text_tokens=32)
fi

compare() {
  local recompute=$1 micro_batch=$2 schedules=$3
  local report="$out/compare-$recompute-$micro_batch.json"
  local settings=(tests/device/flux_slice.yaml "--model.recompute_granularity=$recompute"
    "--grpo.micro_batch_size=$micro_batch" --grpo.jagg_window=5 --grpo.jagg_frac=1 "${shapes[@]}")
  echo "activation recomputation: $recompute, micro-batch $micro_batch"
  "$python" -m megatron_leangrpo compare "${settings[@]}" --schedules "$schedules" --repeat 3 --json "$report"
  "$python" -m tests.device.memory_error "$report" "${settings[@]}"
}

for recompute in none full; do
  compare "$recompute" 1 replay,retain,reweight,jagg
  compare "$recompute" 2 replay,retain,jagg
done
