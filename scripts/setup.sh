#!/usr/bin/env bash
# Installs the packages that quern needs on Debian 12 and are missing: a second call needs no network.
#
#   scripts/setup.sh [all]     build and python
#   scripts/setup.sh build     compiler, build tools and C++ libraries
#   scripts/setup.sh python    the virtual environment .venv with the Python tools (frontends/python) as they stand here
#   scripts/setup.sh parquet   .venv with what they need to tokenize .parquet files too
#   scripts/setup.sh packages  the Debian packages of build, python and fuzz, and nothing else
#   scripts/setup.sh tidy      clang-tidy, for scripts/tidy.sh
#   scripts/setup.sh fuzz      clang and its sanitizer runtimes, for scripts/fuzz.sh and the preset `sanitize`
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

build_packages=(
  g++ cmake ninja-build ccache git pkg-config
  libtomlplusplus-dev nlohmann-json3-dev libfmt-dev libxxhash-dev libzstd-dev libssl-dev
  libboost-dev libboost-filesystem-dev libboost-program-options-dev
  libopenblas-openmp-dev
  libopenmpi-dev openmpi-bin
  libpng-dev libturbojpeg0-dev
  doctest-dev
)
python_packages=(python3 python3-venv)
fuzz_packages=(clang libclang-rt-dev)

fail() {
  echo "setup.sh: $*" >&2
  exit 1
}

installed() {
  [[ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" == installed ]]
}

as_root() {
  if [[ $EUID -eq 0 ]]; then
    "$@"
  elif command -v sudo >/dev/null; then
    sudo --preserve-env=DEBIAN_FRONTEND "$@"
  else
    fail "installing packages needs root and there is no sudo. As root, run: $*"
  fi
}

ensure_packages() {
  command -v dpkg-query >/dev/null || fail "this is not Debian; install the equivalents of: $*"
  local missing=() package
  for package in "$@"; do
    installed "$package" || missing+=("$package")
  done
  [[ ${#missing[@]} -gt 0 ]] || return 0
  echo "installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  as_root apt-get update -qq
  as_root apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

# A stamp is a copy of the pyproject.toml whose requirements were installed into .venv, written last.
ensure_venv() { # extras, separated by commas
  ensure_packages "${python_packages[@]}"
  # Debian's own interpreter: another python3 that leads PATH may lack venv or wheels.
  [[ -x .venv/bin/python ]] || /usr/bin/python3 -m venv --clear .venv
  local package=frontends/python stamp=.venv/quern-$1.installed
  cmp -s $package/pyproject.toml "$stamp" && return
  echo "installing $package with $1 into .venv"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable "$package[$1]"
  # What the wheel's test installs from, without a network.
  .venv/bin/python -c 'import sys, tomllib; print(*tomllib.load(sys.stdin.buffer)["project"]["dependencies"], sep="\n")' \
    <$package/pyproject.toml >.venv/requirements.txt
  .venv/bin/python -m pip download --quiet --disable-pip-version-check --dest .venv/wheels -r .venv/requirements.txt
  cp $package/pyproject.toml "$stamp"
}

case "${1:-all}" in
  build) ensure_packages "${build_packages[@]}" ;;
  python) ensure_venv test ;;
  parquet) ensure_venv test,parquet ;;
  tidy) ensure_packages clang-tidy ;;
  packages) ensure_packages "${build_packages[@]}" "${python_packages[@]}" "${fuzz_packages[@]}" ;;
  fuzz) ensure_packages "${build_packages[@]}" "${fuzz_packages[@]}" ;;
  all)
    ensure_packages "${build_packages[@]}"
    ensure_venv test
    ;;
  *) fail "unknown part '$1'; expected build, python, parquet, packages, tidy, fuzz or all" ;;
esac
