#!/usr/bin/env bash
# Does a recipe converge as a plainer one does? Trains configs/convergence.toml with each recipe and three seeds by
# `quern ab`, tabulates the differences in final validation loss, and plots. Prepares the data first, unless it is
# there. A call that was stopped goes on where it was.
#
#   scripts/convergence/convergence.sh [--gradients | --optimizers | --low-bit | --tune | --all] [--short] [--config FILE]
#                                      [--rates FILE] [--out DIR] [--repeat N] [--jobs N] [more arguments for quern ab]
#
# Without an experiment it compares recipes of 8-bit matmuls.
# --gradients compares not recipes but the formats in which gradients add up, over 16 micro-batches a step: bf16 beside
# fp32, for matmuls in bf16 and in e4m3. `--set train.micro_batch=1 --set train.accumulation=64` makes it harder.
# --optimizers compares optimizers and formats of AdamW's moments with AdamW in fp32, under matmuls in bf16 or, with
# `--set precision.id=e4m3`, in e4m3.
# --low-bit compares weights in int8 (with masters and without), int4 and ternary (BitNet b1.58) with bf16.
# --tune trains each optimizer at five learning rates, one seed each, and at up to four more beyond the best if that is
# the lowest or the highest (tune.py). It writes the best of each to the file that the others read: --rates FILE, else
# scripts/convergence/rates. A rate at which a run diverges is passed over; any other failure ends it.
# --all: --tune, then --optimizers, --low-bit and --optimizers under e4m3, each in a folder of --out.
# --short: a Llama of 91M parameters on the text of the demo, 150 steps.
# --config FILE: another config, whose data are there. --jobs N runs so many seeds, or optimizers of --tune, at a time, on as
# many GPUs as there are.
#
# Exit code 1: with --optimizers and --low-bit an arm is outside its band of scripts/convergence/bands.toml
# or of --bands FILE. Else: the second
# arm's mean difference from the first is not under 0.5% and twice the first's deviation over seeds. That arm is the default
# recipe, with --gradients e4m3 with bf16 gradients.
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
config=configs/convergence.toml
rates=scripts/convergence/rates
short=()
judged=()
every=56
bands=scripts/convergence/bands.toml
warmup=200
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
)
declare -A settings=([recipes]="" [gradients]="train.micro_batch=4 train.accumulation=16" [low-bit]=""
  [optimizers]="optimizer.master=fp32 optimizer.gradient=fp32" [tune]="optimizer.master=fp32 optimizer.gradient=fp32")
# Settings of an optimizer beside its rate. Lion's weight decay is the larger by as much as its rate is the smaller.
declare -A optimizer=([adamw]="" [lion]="optimizer.id=lion,optimizer.lion.weight_decay=0.5," [muon]="optimizer.id=muon,"
  [normuon]="optimizer.id=muon,optimizer.muon.normalize=rows,"
  [schedule_free]="optimizer.id=schedule_free,schedule.id=constant,schedule.constant.warmup=WARMUP,")
declare -A tried=([adamw]="5e-4 1e-3 1.5e-3 3e-3 6e-3" [lion]="5e-5 1e-4 2e-4 4e-4 8e-4" [muon]="2e-3 4e-3 8e-3 1.6e-2 3.2e-2"
  [schedule_free]="5e-4 1e-3 2e-3 4e-3 8e-3")
rest=()
while [[ $# -gt 0 ]]; do
  case $1 in
    --gradients) experiment=gradients && shift ;;
    --optimizers | --low-bit | --tune | --all) experiment=${1#--} && shift ;;
    --short) short=(1) && shift ;;
    --config) config=${2:?--config needs a file} && shift 2 ;;
    --bands) bands=${2:?--bands needs a file} && shift 2 ;;
    --rates) rates=${2:?--rates needs a file} && shift 2 ;;
    --out) out=${2:?--out needs a folder} && shift 2 ;;
    --repeat) repeat=${2:?--repeat needs a number} && shift 2 ;;
    --jobs) jobs=${2:?--jobs needs a number} && shift 2 ;;
    *) rest+=("$1") && shift ;;
  esac
done
[[ $out ]] || { [[ $experiment == recipes ]] && out=runs/convergence || out=runs/convergence-$experiment; }
if [[ $experiment == all ]]; then
  same=(--config "$config" --bands "$bands" --rates "$rates" --repeat "$repeat" --jobs "$jobs" ${short[@]+--short}
    ${rest[@]+"${rest[@]}"})
  code=0
  "$0" --tune --out "$out/tune" "${same[@]}"
  "$0" --optimizers --out "$out/optimizers" "${same[@]}" || code=$?
  "$0" --low-bit --out "$out/low-bit" "${same[@]}" || code=$?
  "$0" --optimizers --out "$out/e4m3" "${same[@]}" --set precision.id=e4m3 || code=$?
  exit $code
fi
if [[ ${#short[@]} -gt 0 ]]; then
  data=data/austen
  short=(data.tokens.train=$data/train.tok data.tokens.validation=$data/val.tok checkpoint.tokenizer=$data
    model.llama.vocab_size=4096 model.llama.hidden_size=768 model.llama.intermediate_size=2048
    model.llama.num_hidden_layers=12 model.llama.num_attention_heads=12 model.llama.num_key_value_heads=12
    train.micro_batch=16 train.steps=150 schedule.cosine.warmup=30)
  warmup=30
  every=10
fi
optimizer[schedule_free]=${optimizer[schedule_free]/WARMUP/$warmup}

# meta.json is written last: while it is there, so is the rest.
if [[ $config == configs/convergence.toml && ! -f $data/meta.json ]]; then
  if [[ $data == data/austen ]]; then
    $python -m quern corpus austen $data/text
    $python -m quern tokenize $data/text --train-bpe 4096 -o $data
  else
    $python -m quern corpus debian $data/text
    $python -m quern tokenize $data/text --train-bpe 16384 --val-fraction 0.02 -o $data
  fi
fi

rate_of() { # optimizer
  awk -v id="$1" '$1 == id { rate = $2 } END { if (rate == "") exit 1; print rate }' "$rates" || {
    echo "$rates: found no rate of $1; make it with --tune" >&2
    exit 2
  }
}
case $experiment in
  tune)
    tuned=()
    for id in adamw lion muon schedule_free; do tuned+=(--optimizer "$id ${optimizer[$id]:--} ${tried[$id]}"); done
    ;;
  optimizers)
    adamw=$(rate_of adamw)
    for moments in fp32 bf16 int8 e4m3; do
      arms[optimizers]+=" optimizer.adamw.moments=$moments,optimizer.learning_rate=$adamw"
    done
    arms[optimizers]+=" optimizer.adamw.moments=bf16,optimizer.master=bf16,optimizer.learning_rate=$adamw"
    for id in lion muon normuon schedule_free; do
      rate=$(rate_of ${id#nor})
      arms[optimizers]+=" ${optimizer[$id]}optimizer.learning_rate=$rate"
    done
    ;;
  low-bit)
    adamw=$(rate_of adamw) low=precision.id=low_bit,precision.low_bit
    for precision in precision.id=bf16 "$low.weights=int8" "$low.weights=int8,precision.low_bit.activations=int8" \
      "$low.weights=int8,precision.low_bit.activations=int8_stochastic" \
      "$low.weights=int8,optimizer.master=none" \
      "$low.weights=int8,precision.low_bit.activations=int8,precision.low_bit.gradients=int8,optimizer.master=none" \
      precision.id=int4 "$low.weights=int4" "$low.weights=ternary,precision.low_bit.activations=int8"; do
      arms[low-bit]+=" $precision,optimizer.learning_rate=$adamw"
    done
    settings[low-bit]="optimizer.master=fp32"
    ;;
esac
if [[ $experiment == optimizers || $experiment == low-bit ]]; then
  judged=(--bands "$bands" --rates "$rates")
  settings[$experiment]+=" train.eval_every=$every"
fi

compare=("$quern" ab "$config")
for arm in ${arms[$experiment]-}; do compare+=(--arm "$arm"); done
for setting in ${settings[$experiment]} ${short[@]+"${short[@]}"}; do compare+=(--set "$setting"); done
compare+=(${rest[@]+"${rest[@]}"})
if [[ $experiment == tune ]]; then
  exec $python scripts/convergence/tune.py "${tuned[@]}" --best "$rates" --out "$out" --jobs "$jobs" -- "${compare[@]}" --set train.seed=1
fi

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

code=0
"${compare[@]}" --set train.seed=1 --repeat "$repeat" --out "$out"
$python scripts/convergence/convergence_table.py "$out" ${judged[@]+"${judged[@]}"} || code=$?
$python -m quern plot ab "$out"
exit $code
