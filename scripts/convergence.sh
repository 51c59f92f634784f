#!/usr/bin/env bash
# Does training in 8 bits converge as bf16 does? Trains configs/convergence.toml with each recipe and three seeds by
# `quern ab`, tabulates the differences in final validation loss, and plots. Prepares the data first, unless it is
# there. A call that was stopped goes on where it was.
#
#   scripts/convergence.sh [--out DIR] [--repeat N] [more arguments for quern ab, such as --set a.b=v]
#
# Exit code 1: the default recipe's mean difference is not under 0.5% and twice bf16's deviation over seeds.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-.venv/bin/python}
quern=${QUERN:-build/release/bin/quern}
data=data/debian
out=runs/convergence
repeat=3
rest=()
while [[ $# -gt 0 ]]; do
  case $1 in
    --out) out=${2:?--out needs a folder} && shift 2 ;;
    --repeat) repeat=${2:?--repeat needs a number} && shift 2 ;;
    *) rest+=("$1") && shift ;;
  esac
done

if [[ ! -f $data/meta.json ]]; then # written last: while it is there, so is the rest
  $python scripts/data/debian.py $data/text
  $python scripts/tokenize.py $data/text --train-bpe 16384 --val-fraction 0.02 -o $data
fi

e4m3=precision.e4m3
$quern ab configs/convergence.toml --repeat "$repeat" --out "$out" \
  --arm precision.id=bf16 \
  --arm precision.id=e4m3 \
  --arm precision.id=e4m3,$e4m3.activation_scaling=current,$e4m3.gradient_scaling=current \
  --arm precision.id=e4m3,$e4m3.activation_scaling=row,$e4m3.gradient_scaling=row \
  --arm precision.id=e4m3,$e4m3.activation_scaling=block,$e4m3.gradient_scaling=block \
  --arm precision.id=e4m3,$e4m3.gradient_format=e5m2 \
  ${rest[@]+"${rest[@]}"}
code=0
$python scripts/convergence_table.py "$out" || code=$?
$python scripts/plot_ab.py "$out"
exit $code
