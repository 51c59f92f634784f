#!/usr/bin/env bash
# Builds everything and runs all tests; the parsers of untrusted files again under address and
# undefined-behaviour sanitizers, and 20 seconds each under a fuzzer, which reach 96 to 100% of the edges that a minute
# reaches; scripts/fuzz.sh fuzzes for longer. Ends with the time of each stage and one line of
# sums: N passed, N failed, N skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

results=()
status=0
times=()

# The stage that begins now, with the seconds and the processor seconds of all before it.
stage() { # name
  local words
  read -ra words <"/proc/$$/stat"
  times+=("$SECONDS $(((words[15] + words[16]) / $(getconf CLK_TCK))) $1")
  echo "== $1"
}

build() { # preset, arguments for the build...
  cmake --preset "$1"
  cmake --build --preset "$@"
}

# A ctest that leaves no results (it crashed, or found no test) counts as one failure in the sums. Many tests wait most of
# the time, so two more run than there are cores.
run_tests() { # preset, ctest arguments...
  local preset=$1 result=$PWD/build/$1/ctest.xml
  shift
  rm -f "$result"
  results+=("$result")
  ctest --test-dir "build/$preset" --output-on-failure --no-tests=error -j"$(($(nproc) + 2))" --output-junit "$result" "$@" || status=1
}

sum_up() {
  .venv/bin/python - "${results[@]}" <<'PYTHON'
import re
import subprocess
import sys
import xml.etree.ElementTree as xml

listed = subprocess.run(["ctest", "--test-dir", "build/release", "-N", "-L", "fast"], capture_output=True, text=True).stdout
fast = set(re.findall(r"^ *Test +#\d+: (.*)$", listed, re.M))
passed = failed = skipped = 0
for path in sys.argv[1:]:
    try:
        cases = list(xml.parse(path).getroot().iter("testcase"))
    except (OSError, xml.ParseError):
        cases = []
    if not cases:
        print(f"{path}: no test results")
        failed += 1
    for case in cases:
        reason = case.find("skipped")
        if case.get("status") == "run":
            passed += 1
        # "notrun" alone may also be a missing program or a failed fixture.
        elif case.get("status") == "disabled" or reason is not None and reason.get("message").startswith("SKIP_"):
            skipped += 1
        else:
            failed += 1
            print(f"failed: {case.get('name')}")
        if case.get("name") in fast and float(case.get("time")) > 10:
            print(f"slow: {case.get('name')}: {case.get('time')} s: docs/testing.md lists those that are not `fast`")
print(f"{passed} passed, {failed} failed, {skipped} skipped")
sys.exit(failed > 0 or passed == 0)
PYTHON
}

# Runs beside the next stages, in what they leave of the processors, as a process group of its own: it ends with this script.
asides=()
aside() { # log, command...
  local log=$1
  shift
  set -m
  (
    renice -n 19 "$BASHPID" >/dev/null
    "$@"
  ) >"$log" 2>&1 </dev/null &
  set +m
  asides+=("$!")
}
# For the one that was begun last: its number may be another group's afterwards.
await_aside() {
  local group=${asides[-1]} result=0
  wait "$group" || result=$?
  unset 'asides[-1]'
  return "$result"
}
end_asides() {
  local group
  for group in "${asides[@]}"; do kill -- "-$group" 2>/dev/null || true; done
}
trap end_asides EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

python_setup() {
  scripts/setup.sh python
  scripts/setup.sh parquet
}
sanitize_build() {
  scripts/setup.sh fuzz
  build sanitize
}

stage setup
mkdir -p build
scripts/setup.sh packages # all that asks for root, before anything runs aside
aside build/python_setup.log python_setup
stage build
build release
cmake --build --preset release --target cuda_other_architectures  # kernels compile for GPUs that this build is not for
stage "rest of setup"
await_aside || { cat build/python_setup.log; exit 1; }
aside build/sanitize_build.log sanitize_build
stage tests
run_tests release
stage "rest of the sanitize build"
fuzzed=$PWD/build/sanitize/fuzz/ctest.xml
rm -f "$fuzzed"
if await_aside; then
  stage "sanitized tests"
  run_tests sanitize -L untrusted
  stage fuzzing
  FUZZ_SEED=1 scripts/fuzz.sh 20 || status=1
else
  cat build/sanitize_build.log
fi
results+=("$fuzzed")
stage "in all"
for ((i = 0; i + 1 < ${#times[@]}; ++i)); do
  read -r began busy name <<<"${times[i]}"
  read -r ended busy_then _ <<<"${times[i + 1]}"
  printf '%6d s  %s, of a processor %d s\n' "$((ended - began))" "$name" "$((busy_then - busy))"
done
printf '%6d s  %s\n' "$SECONDS" "in all, on $(nproc) cores of $(sed -n 's/^model name\s*: //p' /proc/cpuinfo | head -1)"
sum_up || status=1
exit $status
