#!/usr/bin/env bash
# Installs quern to a fresh prefix, builds the examples against that alone, trains with each, and compares one of them
# with `quern ab`: what docs/plugins.md tells its reader to do. A command that the page gives is run here as it stands
# there, and one that is run here under `guide` must be on the page.
#
#   tests/sdk_test.sh BUILD     BUILD: a build folder in which everything is built
set -euo pipefail
source=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=$(cd "$1" && pwd)
page=$source/docs/plugins.md
work=$build/sdk_test
export PREFIX=$work/prefix

fail() {
  echo "sdk_test: $*" >&2
  exit 1
}

guide() { # a command of the page
  grep -qxF -- "    $1" "$page" || fail "docs/plugins.md lacks the command: $1"
  echo "\$ $1"
  eval "$1"
}

expect() { # text, output: the output has the text
  [[ $2 == *"$1"* ]] || fail "expected \"$1\" in:
$2"
}

losses_fall() { # run folder, classes that a loss is over, bound of the last losses
  python3 - "$1/log.jsonl" "${2:-256}" "${3:-3.5}" <<'PYTHON'
import json
import math
import sys

events = [json.loads(line) for line in open(sys.argv[1])]
losses = [event["loss"] for event in events if event["event"] == "step"]
validation = [event["loss"] for event in events if event["event"] == "eval"][-1]
print(f"{len(losses)} steps, loss {losses[0]:.4f} to {losses[-1]:.4f}, validation {validation:.4f}")
# A uniform guess over 256 bytes costs ln 256 = 5.55 nats, and their frequencies alone about 3.3.
guess, bound = math.log(int(sys.argv[2])), float(sys.argv[3])
assert abs(losses[0] - guess) < 0.3 and losses[-1] < bound and validation < bound, "the loss did not fall"
PYTHON
}

only_entry_symbol() { # plugin file
  local symbols
  symbols=$(nm -D --defined-only "$1" | awk '{print $3}')
  [[ $symbols == quern_plugin_manifest ]] || fail "$1 shows other symbols than its entry: $symbols"
}

# Nothing on the include path but the prefix, the project itself and the system.
only_installed_headers() { # build folder
  local flags
  flags=$(grep -oE -- '-(I|isystem|include) ?[^ "]+' "$1/compile_commands.json" | sed -E 's/^-(I|isystem|include) ?//' | sort -u)
  [[ $flags == *"$PREFIX/include"* ]] || fail "$1 was not built with the headers in $PREFIX/include"
  while read -r folder; do
    case $folder in
      "$PREFIX"/* | "$work"/examples/* | /usr/*) ;;
      *) fail "$1 was built with $folder on its include path" ;;
    esac
  done <<<"$flags"
}

rm -rf "$work"
mkdir -p "$work"
cd "$work"
unset QUERN_PLUGIN_PATH CMAKE_PREFIX_PATH
export OMP_NUM_THREADS=1 # small models; other programs may have the other cores
export CMAKE_GENERATOR=Ninja CMAKE_EXPORT_COMPILE_COMMANDS=ON
if command -v ccache >/dev/null; then export CMAKE_CXX_COMPILER_LAUNCHER=ccache CCACHE_BASEDIR=$work CCACHE_NOHASHDIR=1; fi

cmake --install "$build" --prefix "$PREFIX" >install.log
export PATH=$PREFIX/bin:$PATH
[[ $(command -v quern) == "$PREFIX/bin/quern" ]] || fail "the installed program is not found"
for plugin in "$PREFIX"/lib/quern/plugins/*/*.so; do only_entry_symbol "$plugin"; done
[[ -s $PREFIX/share/quern/CHANGELOG.md ]] || fail "CHANGELOG.md, which the refusal of another SDK version names, is not installed"
guide 'cp -r $PREFIX/share/quern/examples .'
guide 'cd examples'
guide 'python3 bytes.py $PREFIX/include/quern/*.h -o bytes'

# One by itself, from its build folder.
NAME=parallel_decoder
guide 'cmake -S $NAME -B build/$NAME -DCMAKE_PREFIX_PATH=$PREFIX -DCMAKE_BUILD_TYPE=Release' >cmake.log || fail "$(<cmake.log)"
guide 'cmake --build build/$NAME' >cmake.log || fail "$(<cmake.log)"
guide 'ctest --test-dir build/$NAME --output-on-failure'
guide 'quern plugins check build/$NAME/plugins/*/libquern_$NAME.so' >check.log || fail "$(<check.log)"
only_installed_headers "build/$NAME"
only_entry_symbol "build/$NAME/plugins/model/libquern_$NAME.so"
guide 'export QUERN_PLUGIN_PATH=$PWD/build/$NAME/plugins'
expect "$PWD/build/$NAME/plugins/" "$(guide 'quern plugins list')"
guide 'quern train $NAME/run.toml' >train.log
losses_fall "runs/$NAME"
guide 'unset QUERN_PLUGIN_PATH'
guide 'cmake --install build/$NAME --prefix $PREFIX' >>cmake.log

# All in one build, whose tests are the kit and the examples' own, and then from the install tree.
guide 'cmake -S . -B build/all -DCMAKE_PREFIX_PATH=$PREFIX -DCMAKE_BUILD_TYPE=Release' >cmake.log || fail "$(<cmake.log)"
guide 'cmake --build build/all' >cmake.log || fail "$(<cmake.log)"
guide 'ctest --test-dir build/all --output-on-failure'
guide 'cmake --install build/all --prefix $PREFIX' >>cmake.log
only_installed_headers build/all
for plugin in build/all/plugins/*/*.so; do only_entry_symbol "$plugin"; done
# Each folder is an example; one without a run of its own, such as data, is in another's.
for folder in */CMakeLists.txt; do
  NAME=${folder%/*}
  [[ -n $(compgen -G "build/all/plugins/*/libquern_$NAME.so") ]] || fail "no plugin of $NAME was built"
  if [[ ! -e $NAME/run.toml ]]; then
    grep -q "\"$NAME\"" */run.toml || fail "no run has $NAME"
    continue
  fi
  [[ $NAME == parallel_decoder ]] && continue # trained above
  guide 'quern train $NAME/run.toml' >train.log
  [[ $NAME == patch_classifier ]] && losses_fall "runs/$NAME" 4 1 || losses_fall "runs/$NAME"
done

[[ $(tail -n 1 runs/csv_lines/events.csv) == end,* ]] || fail "events.csv lacks the run's end"

# A plugin of each kind begins as an example; one of them is built.
(
  mkdir new && cd new
  for kind in model precision communicator offload optimizer schedule data log; do
    quern plugins new $kind my_$kind >/dev/null
    grep -q "KIND $kind)" my_$kind/CMakeLists.txt || fail "a new $kind is of another kind"
  done
)
guide 'quern plugins new schedule my_decay' >new.log
cmake -S my_decay -B build/my_decay -DCMAKE_PREFIX_PATH="$PREFIX" >cmake.log || fail "$(<cmake.log)"
cmake --build build/my_decay >cmake.log || fail "$(<cmake.log)"
quern plugins check build/my_decay/plugins/schedule/libquern_my_decay.so >check.log || fail "$(<check.log)"
message=$(quern plugins new shedule x 2>&1) && fail "a new plugin of kind shedule was made"
expect "there is no such example" "$message"

# An adapter needs nothing of a model's plugin.
guide 'quern train parallel_decoder/run.toml --set adapter.id=lora --set checkpoint.export=true --set log.directory=runs/lora' >train.log
for file in adapter/adapter_model.safetensors export/model.safetensors; do
  [[ -s runs/lora/$file ]] || fail "a run with an adapter wrote no $file"
done

list=$(guide 'quern plugins list')
for plugin in build/all/plugins/*/libquern_*.so; do
  kind=$(basename "$(dirname "$plugin")") id=$(basename "$plugin" .so)
  expect "$kind ${id#libquern_}: " "$list"
done
[[ $list != *"CANNOT BE LOADED"* ]] || fail "$list"
expect "activations" "$(guide 'quern plugins info precision int8_forward')"

guide 'quern train int8_forward/run.toml --set precision.int8_forward.activations=bf16 --set log.directory=runs/weights_only' >train.log
losses_fall runs/weights_only

# The op of squared_relu as the model wrote it, and in another dtype.
expect "%hidden = squared_relu(%up)" "$(guide 'quern plan squared_relu/run.toml --show program --pass model')"
guide 'quern train squared_relu/run.toml --set precision.id=bf16 --set log.directory=runs/squared_relu_bf16' >train.log
losses_fall runs/squared_relu_bf16

# One rank through a communicator: the same bits. Its fault: the run ends with the code of communication.
guide 'quern train solo/run.toml --set parallel.communicator=none --set log.directory=runs/alone' >train.log
steps() { grep '"event":"step"' "$1/log.jsonl" | sed -E 's/"tokens_per_second".*//'; }
diff <(steps runs/solo) <(steps runs/alone) || fail "a run through solo differs from one without communicator"
code=0
message=$(guide 'quern train solo/run.toml --set parallel.solo.fail_at=100 --set log.directory=runs/faulty' 2>&1 >train.log) || code=$?
[[ $code == 6 ]] || fail "a failing communicator: exit code $code, expected 6: $message"
expect "communicator solo: failed at collective 100" "$message"

guide 'quern ab int8_forward/run.toml --vary precision.id=bf16,int8_forward --repeat 2 --steps 30 --out runs/ab' >ab.log
expect "precision.id=int8_forward" "$(<ab.log)"
sed -n '/^| arm/,/^$/p' ab.log

# A build folder inside the project, as `cmake -B build` makes one, then a second, then the project as its own.
cp -r squared_relu inside
for folder in inside/build inside/again inside; do
  for _ in 1 2; do # the second time over what CMake left behind
    cmake -S inside -B "$folder" -DCMAKE_PREFIX_PATH="$PREFIX" -DQUERN_TESTS=OFF >cmake.log || fail "$(<cmake.log)"
    cmake --build "$folder" >cmake.log || fail "$(<cmake.log)"
  done
  only_entry_symbol "$folder/plugins/model/libquern_squared_relu.so"
done

# What the CMake function refuses, it names.
mkdir wrong
printf 'cmake_minimum_required(VERSION 3.25)\nproject(wrong LANGUAGES CXX)\nfind_package(quern_sdk 15 REQUIRED)\nadd_quern_plugin(x KIND modle SOURCES x.cpp)\n' >wrong/CMakeLists.txt
message=$(cmake -S wrong -B build/wrong -DCMAKE_PREFIX_PATH="$PREFIX" 2>&1) && fail "KIND modle was accepted"
expect 'found "modle"' "$message"
printf 'cmake_minimum_required(VERSION 3.25)\nproject(wrong LANGUAGES CXX)\nfind_package(quern_sdk 15 REQUIRED)\nquern_check_plugin(x KIND model)\n' >wrong/CMakeLists.txt
message=$(cmake -S wrong -B build/wrong -DCMAKE_PREFIX_PATH="$PREFIX" 2>&1) && fail "a check of no plugin was accepted"
expect "found no target quern_model_x" "$message"

# A project written for another SDK is refused by CMake, which says where the repairs are; so is one that does not say for which.
asked() { # find_package's arguments
  printf 'cmake_minimum_required(VERSION 3.25)\nproject(wrong LANGUAGES CXX)\nfind_package(%s)\n' "$1" >wrong/CMakeLists.txt
  cmake -S wrong -B build/wrong -DCMAKE_PREFIX_PATH="$PREFIX" 2>&1 | tr -s ' \n' ' '
}
changes="share/quern/CHANGELOG.md lists what each version changed, and the repairs"
message=$(asked 'quern_sdk 10 REQUIRED') && fail "SDK 10 was accepted"
expect "written for SDK 10 of quern, this is SDK 15: " "$message"
expect "$changes" "$message"
for package in quern_sdk quern 'quern 0.1'; do
  message=$(asked "$package REQUIRED")
  expect "does not say for which SDK" "$message"
  expect "$changes" "$message"
done
message=$(asked 'quern 7 REQUIRED') && fail "quern 7 was accepted"
expect "with SDK 15, found for find_package(quern 7)" "$message"
[[ $(asked 'quern_sdk 15 REQUIRED') != *Warning* ]] || fail "the SDK's own version is warned of"

# A data source that opens as nothing ends the run with a message.
mkdir hollow
cat >hollow/CMakeLists.txt <<'CMAKE'
cmake_minimum_required(VERSION 3.25)
project(hollow LANGUAGES CXX)
find_package(quern_sdk 15 REQUIRED)
add_quern_plugin(hollow KIND data)
CMAKE
cat >hollow/plugin.cpp <<'SOURCE'
#include "quern/plugin.h"

struct Hollow final : quern::Dataset {
  bool has(quern::Split) const override { return true; }
  std::unique_ptr<quern::DataSource> open(const quern::DataRequest&) const override { return nullptr; }
};

QUERN_PLUGIN("data", "hollow", manifest) {
  manifest.version = "0.1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::Dataset>("hollow", "opens as nothing", {},
                               [](const quern::OptionValues&) { return std::make_unique<Hollow>(); });
}
SOURCE
cmake -S hollow -B build/hollow -DCMAKE_PREFIX_PATH="$PREFIX" >cmake.log || fail "$(<cmake.log)"
cmake --build build/hollow >cmake.log || fail "$(<cmake.log)"
grep -v '^\(train\|validation\|format\) = ' int8_forward/run.toml | sed 's/^\[data.tokens\]/[data]\nid = "hollow"/' >hollow/run.toml
code=0
message=$(QUERN_PLUGIN_PATH=$PWD/build/hollow/plugins quern train hollow/run.toml --set log.directory=runs/hollow 2>&1) || code=$?
[[ $code == 1 ]] || fail "a data source that opens as nothing: exit code $code, expected 1: $message"
expect 'data "hollow": its training split opened as nothing' "$message"

# With the standard library's debugging containers, which have other sizes, a plugin is refused before any of its code runs.
cmake -S hollow -B build/debug -DCMAKE_PREFIX_PATH="$PREFIX" -DCMAKE_CXX_FLAGS=-D_GLIBCXX_DEBUG >cmake.log || fail "$(<cmake.log)"
cmake --build build/debug >cmake.log || fail "$(<cmake.log)"
message=$(quern plugins check build/debug/plugins/data/libquern_hollow.so 2>&1) && fail "a plugin of debugging containers was accepted"
expect "ABI tag: found" "$message"
expect "-debug (" "$message"
echo "sdk_test: passed"
