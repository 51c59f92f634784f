#!/usr/bin/env bash
# Does training in 8 bits converge as bf16 does? Trains configs/convergence.toml with each recipe and three seeds by
# `quern ab`, tabulates the differences in final validation loss, and plots. Prepares the data first, unless it is
# there. A call that was stopped goes on where it was.
#
#   scripts/convergence/convergence.sh [--gradients | --optimizers] [--out DIR] [--repeat N] [--jobs N] [more arguments for quern ab]
#
# --gradients compares not recipes but the formats in which gradients add up, over 16 micro-batches a step: bf16 beside
# fp32, for matmuls in bf16 and in e4m3. `--set train.micro_batch=1 --set train.accumulation=64` makes it harder.
# --optimizers compares optimizers and formats of AdamW's moments, with matmuls in bf16. Lion's rate is a fifth of AdamW's,
# and its weight decay five times as large; no rate was tuned.
# --jobs N runs so many seeds at a time, on as many GPUs as there are.
#
# Exit code 1: the second arm's mean difference from the first is not under 0.5% and twice the first's deviation over
# seeds. That arm is the default recipe, with --gradients e4m3 with bf16 gradients, with --optimizers int8 moments.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

export PYTHONPATH=$PWD/frontends/python
python=${PYTHON:-.venv/bin/python}
quern=${QUERN:-build/release/bin/quern}
data=data/debian
out=
repeat=3
jobs=1
e4m3=precision.e4m3
experiment=recipes
declare -A arms=(
  [recipes]="precision.id=bf16
    precision.id=e4m3
    precision.id=e4m3,$e4m3.activation_scaling=current,$e4m3.gradient_scaling=current
    precision.id=e4m3,$e4m3.activation_scaling=row,$e4m3.gradient_scaling=row
    precision.id=e4m3,$e4m3.activation_scaling=block,$e4m3.gradient_scaling=block
    precision.id=e4m3,$e4m3.activation_scaling=square,$e4m3.gradient_scaling=square
    precision.id=e4m3,$e4m3.gradient_format=e5m2
    precision.id=int8
    precision.id=int8,precision.int8.gradient_rounding=stochastic"
  [gradients]="precision.id=bf16,optimizer.gradient=fp32
    precision.id=e4m3,optimizer.gradient=bf16
    precision.id=bf16,optimizer.gradient=bf16
    precision.id=e4m3,optimizer.gradient=fp32"
  [optimizers]="optimizer.adamw.moments=bf16
    optimizer.adamw.moments=int8
    optimizer.adamw.moments=e4m3
    optimizer.adamw.moments=fp32
    optimizer.id=lion,optimizer.learning_rate=3e-4,optimizer.lion.weight_decay=0.5
    optimizer.id=muon"
)
declare -A settings=([recipes]="" [gradients]="train.micro_batch=4 train.accumulation=16" [optimizers]="")
rest=()
while [[ $# -gt 0 ]]; do
  case $1 in
    --gradients) experiment=gradients && shift ;;
    --optimizers) experiment=optimizers && shift ;;
    --out) out=${2:?--out needs a folder} && shift 2 ;;
    --repeat) repeat=${2:?--repeat needs a number} && shift 2 ;;
    --jobs) jobs=${2:?--jobs needs a number} && shift 2 ;;
    *) rest+=("$1") && shift ;;
  esac
done
[[ $out ]] || { [[ $experiment == recipes ]] && out=runs/convergence || out=runs/convergence-$experiment; }

if [[ ! -f $data/meta.json ]]; then # written last: while it is there, so is the rest
  $python -m quern corpus debian $data/text
  $python -m quern tokenize $data/text --train-bpe 16384 --val-fraction 0.02 -o $data
fi

compare=("$quern" ab configs/convergence.toml)
for arm in ${arms[$experiment]}; do compare+=(--arm "$arm"); done
for setting in ${settings[$experiment]}; do compare+=(--set "$setting"); done
compare+=(${rest[@]+"${rest[@]}"})

# Seeds at the same time are comparisons of their own, with a cache of timed matmuls each; their runs then become
# one comparison's, which trains the failed ones once more.
if [[ $jobs -gt 1 && ! -d $out ]]; then
  gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
  for ((seed = 1; seed <= repeat; ++seed)); do
    while [[ $(jobs -rp | wc -l) -ge $jobs ]]; do wait -n || true; done
    part=$out.seed-$seed
    mkdir -p "$part.cache"
    CUDA_VISIBLE_DEVICES=$(((seed - 1) % (gpus > 0 ? gpus : 1))) XDG_CACHE_HOME=$(realpath "$part.cache") \
      "${compare[@]}" --set train.seed=$seed --out "$part" >"$part.cache/log.txt" 2>&1 &
  done
  wait || true
  cat "$out".seed-*.cache/log.txt
  mv "$out.seed-1" "$out"
  for ((seed = 2; seed <= repeat; ++seed)); do
    for run in "$out.seed-$seed"/*/"seed-$seed"; do mv "$run" "$out/$(basename "$(dirname "$run")")/"; done
    rm -r "$out.seed-$seed"
  done
  rm -r "$out".seed-*.cache
fi

"${compare[@]}" --set train.seed=1 --repeat "$repeat" --out "$out"
code=0
$python scripts/convergence/convergence_table.py "$out" || code=$?
$python -m quern plot ab "$out"
exit $code
