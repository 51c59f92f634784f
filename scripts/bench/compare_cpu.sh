#!/usr/bin/env bash
# Training speed on the CPU beside PyTorch's: one model (width 256, 4 layers, 4 heads, FFN 704, vocabulary 4096, sequence 256,
# micro-batch 8, fp32), the two in turn, and the ratio of their best runs. Needs a Python with torch.
#
#   scripts/bench/compare_cpu.sh [ROUNDS] [PYTHON]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

rounds=${1:-3}
python=${2:-python3}
quern=build/release/bin/quern
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

speed() { # file
  $python -c 'import json, sys; print("%.0f" % json.load(open(sys.argv[1]))["tokens_per_second"])' "$1"
}

best_quern=0
best_torch=0
for ((round = 1; round <= rounds; round++)); do
  $quern bench configs/demo.toml --steps 15 --json "$work/quern.json" --set train.sequence=256 --set train.micro_batch=8 \
    --set model.llama.num_key_value_heads=4 >/dev/null
  mine=$(speed "$work/quern.json")
  $python scripts/bench/torch_cpu.py --json >"$work/torch.json"
  theirs=$(speed "$work/torch.json")
  echo "round $round: quern $mine tok/s, torch $theirs tok/s"
  best_quern=$((mine > best_quern ? mine : best_quern))
  best_torch=$((theirs > best_torch ? theirs : best_torch))
done
$python -c "print(f'best: quern $best_quern, torch $best_torch, ratio {$best_quern / $best_torch:.2f}')"
