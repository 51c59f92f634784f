#!/usr/bin/env bash
# Builds everything and runs all tests; the parsers of untrusted files again under address and
# undefined-behaviour sanitizers, and a minute each under a fuzzer. Ends with one line of sums: N passed, N failed,
# N skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

results=()
status=0

build() { # preset, arguments for the build...
  cmake --preset "$1"
  cmake --build --preset "$@"
}

# A ctest that leaves no results (it crashed, or found no test) counts as one failure in the sums. Some tests wait most of
# the time, so one more runs than there are cores.
run_tests() { # preset, ctest arguments...
  local preset=$1 result=$PWD/build/$1/ctest.xml
  shift
  rm -f "$result"
  results+=("$result")
  ctest --test-dir "build/$preset" --output-on-failure --no-tests=error -j"$(($(nproc) + 1))" --output-junit "$result" "$@" || status=1
}

sum_up() {
  .venv/bin/python - "${results[@]}" <<'PYTHON'
import sys
import xml.etree.ElementTree as xml

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
print(f"{passed} passed, {failed} failed, {skipped} skipped")
sys.exit(failed > 0 or passed == 0)
PYTHON
}

scripts/setup.sh
scripts/setup.sh parquet
build release
cmake --build --preset release --target cuda_other_architectures  # kernels compile for GPUs that this build is not for
run_tests release
fuzzed=$PWD/build/sanitize/fuzz/ctest.xml
rm -f "$fuzzed"
if scripts/setup.sh fuzz && build sanitize; then
  run_tests sanitize -L untrusted
  FUZZ_SEED=1 scripts/fuzz.sh 60 || status=1
fi
results+=("$fuzzed")
sum_up || status=1
exit $status
