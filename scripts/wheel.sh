#!/usr/bin/env bash
# Makes the wheel of quern from a build folder: program, plugins, tools, SDK, and the libraries that they need, except
# CUDA's, which their own wheels bring (the extra cuda13), and MPI's, which a machine has or not.
#
#   scripts/wheel.sh [OUT]                            builds the preset `portable`; the wheel goes to OUT, default dist
#   scripts/wheel.sh --build BUILD [--no-cuda] [OUT]  takes what BUILD has; --no-cuda leaves out plugins that need CUDA
#   --quick                                           compresses little, for a test
#
# scripts/setup.sh python installs what it needs beside the build's packages.
set -euo pipefail
source=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() {
  echo "wheel.sh: $*" >&2
  exit 1
}

build= cuda=yes out= level=()
while [[ $# -gt 0 ]]; do
  case $1 in
    --build) build=${2:?--build takes a folder} && shift ;;
    --no-cuda) cuda=no ;;
    --quick) level=(--zip-compression-level 1) ;;
    -*) fail "unknown option $1; expected --build, --no-cuda or --quick" ;;
    *) out=$1 ;;
  esac
  shift
done
if [[ -z $build ]]; then
  build=$source/build/portable
  cmake -S "$source" --preset portable
  cmake --build "$build"
fi
build=$(cd "$build" && pwd)
mkdir -p "${out:=$source/dist}"
out=$(cd "$out" && pwd)
tools=$source/.venv/bin
[[ -x $tools/auditwheel ]] || fail "$tools/auditwheel is not there; run scripts/setup.sh python"
export PATH=$tools:$PATH

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tree=$work/tree
cmake --install "$build" --component Unspecified --strip --prefix "$tree" >"$work/install.log" || fail "$(<"$work/install.log")"
needs() { # pattern, file
  readelf -d "$2" | grep -qE "NEEDED.*\[lib($1)"
}

# Wheels have no links: the library has the one name that it is loaded by.
version=$(readlink "$tree/lib/libquern.so.0")
rm "$tree/lib/libquern.so" "$tree/lib/libquern.so.0"
mv "$tree/lib/$version" "$tree/lib/libquern.so.0"
sed -i "s/$version/libquern.so.0/" "$tree"/lib/cmake/*/*-targets-*.cmake

# Of the CPU device, which loads it by this name.
blas=$(sed -En 's/^BLAS_(openblas_)?LIBRAR[^=]*=//p' "$build/CMakeCache.txt" | grep -m1 '\.so') || fail "found no BLAS in $build/CMakeCache.txt"
blas=$(readlink -f "$blas")
cp "$blas" "$tree/lib/$(readelf -d "$blas" | sed -n 's/.*SONAME.*\[\(.*\)\]/\1/p')"

# From quern/tree/lib/quern/plugins/<kind>: lib, and where pip puts CUDA's libraries beside quern.
nvidia=
for package in cu13 cudnn nccl; do nvidia+=:'$ORIGIN'/../../../../../../nvidia/$package/lib; done
for plugin in "$tree"/lib/quern/plugins/*/*.so; do
  if needs "cuda|cublas|cudnn|nccl|nvrtc" "$plugin"; then
    if [[ $cuda == no ]]; then
      rm "$plugin"
    else
      patchelf --set-rpath '$ORIGIN/../../..'"$nvidia" "$plugin"
    fi
  else
    patchelf --set-rpath '$ORIGIN/../../..' "$plugin"
  fi
done
if [[ $cuda == yes && ! -f $tree/lib/quern/plugins/device/libquern_cuda.so ]]; then
  fail "$build has no cuda device; configure it with CUDA and cuDNN, or give --no-cuda"
fi

(cd "$source/frontends/python" && QUERN_TREE=$tree "$tools/python" -m hatchling build -t wheel -d "$work/plain") \
  >"$work/wheel.log" 2>&1 || fail "$(<"$work/wheel.log")"
# Copies the other libraries into quern.libs, and names the oldest C library that all of this runs with.
auditwheel repair "${level[@]}" --wheel-dir "$out" "$work"/plain/*.whl --exclude 'libcu*' --exclude 'libnv*' --exclude 'libnccl*' \
  --exclude 'libmpi*' --exclude 'libopen-*' >"$work/repair.log" 2>&1 || fail "$(<"$work/repair.log")"
ls -sh1 "$out"/quern-*.whl
