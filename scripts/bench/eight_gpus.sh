#!/usr/bin/env bash
# The table of several GPUs, eight or fewer: collectives, then whole steps beside the slowest of the same GPUs alone.
# Under 9 minutes on eight H100. Logs and every step's figures stay in build/eight-gpus.
#
#   scripts/bench/eight_gpus.sh TOKENS.tok [ROW...]
#
# ROW, as of shell names, are the rows that are run: '0.5b*' 'comm*'. GPUS is how many GPUs take part (all that there
# are, if not given), BUILD a build folder (build/release), BUDGET what a plan may use of a GPU (74GiB), LIMIT the
# seconds that a run may take (75). A row is the median of its steps after the first two. A run that fails is a row that
# says so, and the script then ends with 1.
set -uo pipefail
[[ $# -ge 1 && -f $1 ]] || { sed -n '2,12s/^# \{0,1\}//p' "$0" >&2; exit 2; }
tokens=$(realpath "$1")
shift
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit

rows=("${@:-*}")
quern=$(realpath "${BUILD:-build/release}")/bin/quern
gpus=${GPUS:-$(nvidia-smi -L 2>/dev/null | wc -l)}
budget=${BUDGET:-74GiB}
limit=${LIMIT:-75}
logs=build/eight-gpus
failures=0

[[ -x $quern ]] || { echo "eight_gpus.sh: $quern is not there: build first, or set BUILD" >&2; exit 2; }
[[ $gpus -ge 2 ]] || { echo "eight_gpus.sh: found $gpus GPUs, expected at least 2" >&2; exit 2; }
mkdir -p "$logs"

wanted() {
  local pattern
  # shellcheck disable=SC2053  # a pattern
  for pattern in "${rows[@]}"; do [[ $1 == $pattern ]] && return 0; done
  return 1
}

# train NAME CONFIG KEY=VALUE...: one run, whose events go to $logs/NAME.jsonl; false: it failed.
train() {
  local name=$1 config=$2 settings=() setting
  shift 2
  for setting in "$@"; do settings+=(--set "$setting"); done
  rm -rf "${logs:?}/$name" "$logs/$name.jsonl"
  timeout -s KILL "$limit" "$quern" train "configs/$config.toml" --set data.tokens.train="$tokens" --set device.id=cuda \
    --set device.cuda.matmul_search=listed --set memory.device_budget="$budget" --set checkpoint.every=0 \
    --set checkpoint.at_end=false --set checkpoint.export=false --set train.eval_every=0 --set log.every=1 \
    --set log.directory="$logs/$name" "${settings[@]}" >"$logs/$name.txt" 2>&1 || return
  cp "$logs/$name"/*.jsonl "$logs/$name.jsonl"
}

# median NAME...: of each run the median of tokens/s after two steps; the least of the runs.
median() {
  (cd "$logs" && python3 - "$@" <<'PYTHON'
import json, statistics, sys
steps = lambda name: [e["tokens_per_second"] for e in map(json.loads, open(name + ".jsonl")) if e["event"] == "step"]
print(round(min(statistics.median(steps(name)[2:]) for name in sys.argv[1:])))
PYTHON
  )
}

# row NAME CONFIG MICRO_STEPS STEPS ALONE KEY=VALUE...: on all GPUs, MICRO_STEPS on each. ALONE is a row to whose GPUs
# alone it is compared, all of them at once; they run with that row. "-": none.
row() {
  local name=$1 config=$2 micro_steps=$3 steps=$4 alone=$5 gpu process processes=() setting all slowest="" share=""
  shift 5
  wanted "$name" || return 0
  if ! train "$name" "$config" train.accumulation=$((micro_steps * gpus)) train.steps="$steps" parallel.ranks="$gpus" "$@"; then
    failures=$((failures + 1))
    echo "| $name | failed: $(grep -E 'error' "$logs/$name.txt" | head -n 1 || true) | | | |"
    return 0
  fi
  all=$(median "$name")
  if [[ $alone == "$name" ]]; then
    local own=()
    for setting in "$@"; do [[ $setting == parallel.* ]] || own+=("$setting"); done
    for ((gpu = 0; gpu < gpus; ++gpu)); do
      CUDA_VISIBLE_DEVICES=$gpu train "$name.alone$gpu" "$config" train.accumulation="$micro_steps" train.steps="$steps" "${own[@]}" &
      processes+=($!)
    done
    for process in "${processes[@]}"; do wait "$process" || failures=$((failures + 1)); done
  fi
  # shellcheck disable=SC2046  # names have no spaces
  [[ $alone == - ]] || ! wanted "$alone" || slowest=$(median $(seq -f "$alone.alone%g" 0 $((gpus - 1))) 2>/dev/null)
  [[ -z $slowest ]] || share=$(awk "BEGIN { printf \"%.1f%%\", 100 * $all / $gpus / $slowest }")
  echo "| $name | $all | $((all / gpus)) | $slowest | $share |"
}

if wanted comm; then
  "$quern" bench comm configs/qwen2.5/0.5b.toml --set device.id=cuda --set parallel.ranks="$gpus" \
    --communicators nccl,memcpy --sizes 4KiB,64MiB,256MiB >"$logs/comm.txt" 2>&1 || failures=$((failures + 1))
  cat "$logs/comm.txt"
fi

e4m3=precision.id=e4m3 zero1=parallel.zero=1 zero3=parallel.zero=3 nccl=parallel.communicator=nccl memcpy=parallel.communicator=memcpy
echo "| $gpus x $(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1) | tok/s | of a GPU | slowest alone | share |"
echo "| --- | --- | --- | --- | --- |"
row 0.5b-32x16-nccl qwen2.5/0.5b 16 6 0.5b-32x16-nccl $e4m3 $zero1 $nccl train.micro_batch=32
row 0.5b-32x16-memcpy qwen2.5/0.5b 16 6 0.5b-32x16-nccl $e4m3 $zero1 $memcpy train.micro_batch=32
row 0.5b-32x2-nccl qwen2.5/0.5b 2 14 0.5b-32x2-nccl $e4m3 $zero1 $nccl train.micro_batch=32
row 0.5b-32x2-memcpy qwen2.5/0.5b 2 14 0.5b-32x2-nccl $e4m3 $zero1 $memcpy train.micro_batch=32
row 7b-8x4 qwen2.5/7b 4 5 - $e4m3 $zero1 $nccl train.micro_batch=8
row 8b-t8192-e4m3 llama/3.1-8b 4 5 - $e4m3 $zero1 $nccl train.sequence=8192 train.micro_batch=2
row 8b-t8192-bf16 llama/3.1-8b 4 5 - precision.id=bf16 $zero3 $nccl train.sequence=8192 train.micro_batch=1
row llama2-7b-t4096-e4m3 llama/2-7b 4 5 - $e4m3 $zero1 $nccl train.sequence=4096 train.micro_batch=2
row 14b-4x4 qwen2.5/14b 4 5 - $e4m3 $zero3 $nccl train.micro_batch=4
[[ $failures == 0 ]]
