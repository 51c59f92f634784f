#!/usr/bin/env bash
# Fuzzes the parsers of untrusted files (tests/fuzz) with libFuzzer under address and undefined-behaviour sanitizers, and
# the Python tools that read logs (target `logs`: frontends/python/tests/log_fuzz_test.py).
#
#   scripts/fuzz.sh [SECONDS [TARGET...]]     SECONDS for each target, 60 by default; all targets by default
#
# Inputs are drawn anew each time, unless FUZZ_SEED is a number above 0: a test is to fail for a change, not by
# luck. As many targets run at a time as there are cores. Corpora stay in build/sanitize/fuzz/corpus, so that a later run
# goes on from them; what breaks a promise is kept in build/sanitize/fuzz/findings, and `build/sanitize/bin/fuzz_TARGET
# FILE` shows it again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seconds=${1:-60}
targets=("${@:2}")
[[ $seconds =~ ^[1-9][0-9]*$ ]] || { echo "fuzz.sh: seconds: found '$seconds', expected a number above 0" >&2; exit 2; }
scripts/setup.sh fuzz
scripts/setup.sh python
cmake --preset sanitize >/dev/null
cmake --build --preset sanitize --target fuzz_targets

programs=$PWD/build/sanitize/bin
here=$PWD/build/sanitize/fuzz
if [[ ${#targets[@]} -eq 0 ]]; then
  for program in "$programs"/fuzz_*; do
    target=${program##*/fuzz_}
    [[ $target == seeds ]] || targets+=("$target")
  done
  targets+=(logs)
fi
mkdir -p "$here"/{corpus,findings,log}
results=$here/ctest.xml # as ctest writes them, for scripts/test.sh
rm -f "$results"
rm -rf "$here/seeds"
"$programs/fuzz_seeds" "$here/seeds"
if [[ -d /dev/shm ]]; then # the files that targets read need no disk
  export TMPDIR=/dev/shm
fi
unset QUERN_PLUGIN_PATH

fuzz() { # target: its log ends with libFuzzer's sums
  if [[ $1 == logs ]]; then
    FUZZ_SEED="${FUZZ_SEED:-$RANDOM}" PYTHONPATH=$PWD/frontends/python \
      .venv/bin/python frontends/python/tests/log_fuzz_test.py "$seconds" >"$here/log/$1" 2>&1
    return
  fi
  mkdir -p "$here/corpus/$1"
  "$programs/fuzz_$1" -seed="${FUZZ_SEED:-0}" -max_total_time="$seconds" -max_len=65536 -timeout=10 \
    -rss_limit_mb=2048 -print_final_stats=1 -artifact_prefix="$here/findings/$1-" \
    "$here/corpus/$1" "$here/seeds/$1" >"$here/log/$1" 2>&1
}

figure() { # target, name of libFuzzer's: 0 when it crashed before it said any
  sed -n "s/^stat::$2: *//p" "$here/log/$1" | tail -1
}

status=0
cases=
declare -A running=() # process id -> target
finish_one() {
  local process result=0
  wait -n -p process || result=$?
  local target=${running[$process]}
  unset "running[$process]"
  cases+="<testcase name=\"fuzz: $target\" status=\"$([[ $result -eq 0 ]] && echo run || echo fail)\"/>"
  if [[ $result -eq 0 ]]; then
    echo "$target: $(figure "$target" number_of_executed_units) inputs," \
      "$(figure "$target" new_units_added) new in the corpus, no findings"
  else
    status=1
    echo "$target: FINDING; the end of $here/log/$target:"
    grep -av '^#' "$here/log/$target" | tail -40
  fi
}

for target in "${targets[@]}"; do
  [[ $target == logs || -x $programs/fuzz_$target ]] || { echo "fuzz.sh: no target '$target'" >&2; exit 2; }
  while [[ ${#running[@]} -ge $(nproc) ]]; do finish_one; done
  fuzz "$target" &
  running[$!]=$target
done
while [[ ${#running[@]} -gt 0 ]]; do finish_one; done
echo "<testsuite>$cases</testsuite>" >"$results"
exit $status
