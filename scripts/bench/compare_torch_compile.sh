#!/usr/bin/env bash
# Training speed on the GPU beside transformers under torch.compile: one config, the two in turn, each step of equally many
# tokens, and the ratio of their medians over all rounds. Needs a Python with torch and transformers.
#
#   scripts/bench/compare_torch_compile.sh [CONFIG] [ROUNDS] [PYTHON] [quern options...]
#   scripts/bench/compare_torch_compile.sh configs/qwen2.5/0.5b.toml 3 python3 --set train.accumulation=4
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

config=${1:-configs/qwen2.5/0.5b.toml}
rounds=${2:-3}
python=${3:-python3}
shift $(($# < 3 ? $# : 3))
quern=${QUERN:-build/release/bin/quern}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

speed() { # file
  "$python" -c 'import json, sys; print("%.0f" % json.load(open(sys.argv[1]))["tokens_per_second"])' "$1"
}

echo "$config $*"
for ((round = 1; round <= rounds; round++)); do
  "$quern" bench "$config" --json "$work/quern.json" "$@" >/dev/null
  speed "$work/quern.json" >>"$work/quern"
  "$python" scripts/bench/torch_compile.py "$config" --json "$@" >"$work/torch.json"
  speed "$work/torch.json" >>"$work/torch"
  echo "round $round: quern $(tail -n 1 "$work/quern") tok/s, torch.compile $(tail -n 1 "$work/torch") tok/s"
done
"$python" - "$work" <<'PYTHON'
import json
import statistics
import sys

work = sys.argv[1]
quern, torch = (statistics.median(map(float, open(f"{work}/{name}"))) for name in ("quern", "torch"))
peer = json.load(open(f"{work}/torch.json"))
print(f"median: quern {quern:.0f} tok/s, torch.compile {torch:.0f} tok/s, ratio {quern / torch:.3f}")
print(f"torch.compile ran {peer['micro_batch']} x {peer['accumulation']} x {peer['sequence']} in "
      f"{peer['peak_bytes'] / 2**30:.1f} GiB, torch {peer['torch']}, transformers {peer['transformers']}, {peer['device']}")
PYTHON
