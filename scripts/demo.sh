#!/usr/bin/env bash
# From a fresh checkout to a trained model on this machine's CPU: set up, build, prepare Jane Austen's
# novels, train configs/demo.toml, plot. Each stage skips finished work.
#
#   scripts/demo.sh [--fresh] [arguments for quern train]     --fresh: train again from the start
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=.venv/bin/python
tools=.venv/bin/quern-tools
quern=build/release/bin/quern
data=data/austen
run=runs/demo

stage() { # title command...
  local title=$1 started=$SECONDS
  shift
  printf '\n== %s\n' "$title"
  "$@"
  printf -- '-- %s: %d s\n' "$title" $((SECONDS - started))
}

build() {
  cmake --preset release >/dev/null
  cmake --build --preset release --target quern_demo
}

prepare_data() {
  # meta.json is written last: while it is there, so is the rest.
  if [[ -f $data/meta.json ]]; then
    echo "$data is there already"
    return
  fi
  $tools corpus austen $data/text
  $tools tokenize $data/text --train-bpe 4096 -o $data
}

finished() {
  [[ -f $run/log.jsonl ]] && grep -q '"event": *"end"' $run/log.jsonl
}

train() {
  if [[ $# -eq 0 ]] && finished; then
    echo "$run is finished; scripts/demo.sh --fresh trains it again"
    return
  fi
  $quern train configs/demo.toml "$@"
}

unigram_entropy() {
  $python -c 'import json, sys; print("%.2f" % json.load(open(sys.argv[1]))["val_unigram_entropy"])' $data/meta.json
}

plot() {
  $tools plot loss $run -o $run/loss.png --reference "unigram entropy=$(unigram_entropy)"
}

summary() {
  $python - $run $data/meta.json <<'PYTHON'
import json, sys

run, meta = sys.argv[1:]
records = [json.loads(line) for line in open(f"{run}/log.jsonl")]
loss = [record for record in records if record.get("event") == "end"][-1]["val_loss"]
unigram = json.load(open(meta))["val_unigram_entropy"]
print(f"""
  validation loss      {loss:6.3f} nats per token
  unigram entropy      {unigram:6.3f}    what knowing only the tokens' frequencies would reach
  learned beyond it    {unigram - loss:6.3f}

  plot                 {run}/loss.png
  Hugging Face export  {run}/export

Next:
  .venv/bin/quern-tools generate configs/demo.toml "It is a truth"
                                                      text from the model
  build/release/bin/quern plan configs/demo.toml      where every byte and millisecond goes
  build/release/bin/quern plugins list                devices, models, precisions to choose from
  build/release/bin/quern train configs/demo.toml --set precision.id=bf16 --set log.directory=runs/demo-bf16
  scripts/demo.sh --fresh                             train again from the start""")
PYTHON
}

if [[ ${1:-} == --fresh ]]; then
  shift
  rm -rf $run
fi
started=$SECONDS
stage "set-up" scripts/setup.sh
stage "build" build
stage "data" prepare_data
stage "training" train "$@"
stage "plot" plot
summary
printf '\nThe whole took %d s.\n' $((SECONDS - started))
