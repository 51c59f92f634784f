#!/usr/bin/env bash
# Runs the commands of docs/getting-started.md and docs/fine-tuning.md from an install: as the user nobody, with an
# empty home, and with the checkout hidden. Trains for a few steps only; fine-tuning starts from the demo's export. Needs
# root, and the network for pip and for the demo's texts.
#
#   scripts/install_checks.sh BUILD [PYTHONPATH]     BUILD: a build folder in which everything is built
#                                                    PYTHONPATH: where torch and transformers are, for check-export
set -euo pipefail
build=$(realpath "$1")
torch=${2:-}
checkout=$(sed -n 's/^CMAKE_HOME_DIRECTORY:INTERNAL=//p' "$build/CMakeCache.txt")
home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT

cmake --install "$build" --prefix "$home/quern" >/dev/null

commands() {
  set -euxo pipefail
  python3 -m venv "$HOME/quern/venv"
  "$HOME/quern/venv/bin/pip" install --quiet "$HOME/quern/lib/quern/python[parquet,wandb]"
  export PATH=$HOME/quern/bin:$HOME/quern/venv/bin:$PATH
  cp -r quern/share/quern/configs quern/share/quern/examples .

  quern-tools corpus austen data/austen/text
  quern-tools tokenize data/austen/text --train-bpe 4096 -o data/austen
  quern config check configs/demo.toml
  quern data show configs/demo.toml >data.txt
  quern plan configs/demo.toml
  local few=(--set train.steps=4 --set train.eval_every=2 --set checkpoint.every=2 --set schedule.cosine.warmup=1)
  quern train configs/demo.toml "${few[@]}" --set 'log.sinks=["console","jsonl","tensorboard"]'
  quern train configs/demo.toml "${few[@]}" --set log.directory=runs/e4m3 --set precision.id=e4m3 --set log.scales_every=1
  quern-tools plot loss runs/demo -o loss.png
  quern-tools plot scales runs/e4m3 -o scales.png
  quern-tools report runs/demo runs/e4m3 -o report.html
  quern-tools export-wandb runs/demo
  quern-tools generate configs/demo.toml "It is a truth" --max-tokens 8
  quern generate configs/demo.toml --prompt-tokens 12,7,300 --max-tokens 8
  quern eval configs/demo.toml --json eval.json
  if [ -n "$TORCH" ]; then
    local loss
    loss=$(python3 -c 'import json; print(json.load(open("eval.json"))["total"]["loss"])')
    PYTHONPATH=$TORCH quern-tools check-export runs/demo/export data/austen/val.tok --sequence 128 --expect "$loss"
  else
    echo "check-export is left out: no PYTHONPATH with torch and transformers was given"
  fi
  quern-tools tokenize data/austen/text --tokenizer runs/demo/export/tokenizer.json -o data/finetune
  local tune=(configs/finetune/qwen2.5-0.5b.toml --set model.id=llama --set device.id=cpu --set train.sequence=128)
  for key in model.config train.from checkpoint.tokenizer; do tune+=(--set "$key=runs/demo/export"); done
  quern plan "${tune[@]}"
  quern train "${tune[@]}" "${few[@]}"
  quern-tools plot loss runs/finetune-qwen2.5-0.5b -o loss.png
  quern ab configs/demo.toml --vary precision.id=fp32,bf16 --repeat 2 --steps 2
  quern-tools plot ab runs/ab-demo
  quern bench configs/demo.toml
  quern plugins list
  quern plugins info precision e4m3 >e4m3.txt
  quern plugins check precision/bf16
  cmake -S examples/squared_relu -B build -DCMAKE_PREFIX_PATH="$HOME/quern" -DCMAKE_BUILD_TYPE=Release
  cmake --build build
}

chown -R nobody: "$home"
unshare --mount bash -euc 'mount -t tmpfs none "$1"; cd "$2"
  exec setpriv --reuid nobody --regid nogroup --clear-groups env -i HOME="$2" TORCH="$4" PATH=/usr/bin:/bin LANG=C.UTF-8 bash -c "$3"' \
  install_checks "$checkout" "$home" "$(declare -f commands); commands" "$torch"
echo "all commands ran from the install"
