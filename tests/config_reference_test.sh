#!/usr/bin/env bash
# docs/config.md is `quern config reference` under a line that says so. Fails when the page differs from the program.
#
#   tests/config_reference_test.sh [--write] [QUERN]     --write: write the page instead; QUERN: the program
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

write=false
if [[ ${1:-} == --write ]]; then
  write=true
  shift
fi
quern=${1:-build/release/bin/quern}
page=docs/config.md

expected=$(mktemp)
trap 'rm -f "$expected"' EXIT
unset QUERN_PLUGIN_PATH # other plugins are not part of the page
echo '<!-- Made by `quern config reference`; do not edit. To renew: tests/config_reference_test.sh --write -->' >"$expected"
"$quern" config reference >>"$expected"

if $write; then
  cat "$expected" >$page
elif ! diff -u $page "$expected"; then
  echo "$page differs from \`quern config reference\` (lines with + are the program's); build everything, then run" \
    "tests/config_reference_test.sh --write"
  exit 1
fi
