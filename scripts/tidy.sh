#!/usr/bin/env bash
# clang-tidy with the checks of .clang-tidy, as the release preset compiles; fails when it finds something. Slow:
# about 15 seconds a file on one core.
#
#   scripts/tidy.sh [FILE...]     FILE: a .cpp; default: all of core, frontends and plugins but tests and benchmarks
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh tidy
cmake --preset release >/dev/null # writes compile_commands.json
commands=build/release/compile_commands.json

files=("$@")
if [[ ${#files[@]} -eq 0 ]]; then
  mapfile -t files < <(git ls-files 'core/*.cpp' 'frontends/*.cpp' 'plugins/*.cpp' | grep -vE '_(test|bench)\.cpp$')
fi
built=()
for file in "${files[@]}"; do
  if grep -qF "\"$(realpath "$file")\"" $commands; then
    built+=("$file")
  else
    echo "left out: $file, which this machine does not build"
  fi
done
[[ ${#built[@]} -gt 0 ]] || exit 1

# The compiler is GCC, some of whose warnings clang does not know. clang's own count of warnings includes system headers.
printf '%s\0' "${built[@]}" |
  xargs -0 -n1 -P"$(nproc)" clang-tidy -p build/release --quiet --warnings-as-errors='*' \
    --extra-arg=-Wno-unknown-warning-option 2> >(grep -vE '^[0-9]+ warnings? (generated|treated)' >&2)
