#!/usr/bin/env bash
# Checks that need an NVIDIA GPU: all GPU tests, and compute-sanitizer over tests and over training
# steps of tiny models. One line a check; logs stay in build/gpu-checks.
#
#   scripts/gpu_checks.sh [--quick] [PATTERN]
#
# --quick leaves out the sanitizer over the test program, the longest part. PATTERN, as of shell names, is of the checks
# that are run: 'racecheck_*'.
#
# RACE_BUILD names a build made with -DQUERN_RACECHECK=ON, for racecheck over attention's gradient and own GEMMs on
# Hopper: there one lane arrives at a barrier for its warp, after __syncwarp, when the warp has read a tile, or written
# ratios of scales. racecheck does not follow that, and reports what comes after; in such a build every lane arrives. It
# takes minutes over a GEMM of a test's size, so these are small.
#
# PTX_BUILD (build/ptx89 if not given; built if it is not there) is a build of PTX for compute capability 8.9 alone. Any
# newer GPU compiles it when it starts, and so runs what an RTX 4090 would: the kernels without Hopper's, and the
# libraries' GEMMs and attention. The GPU's tests and ten steps of 0.5B run that way.
#
# SANITIZER is the path of a compute-sanitizer to take instead of the toolkit's. CUDA 13.0's fails, in racecheck, inside
# GEMMs that quantize, and inside the libraries' GEMMs that copy by TMA, which they take for bf16 and 8 bits at
# sizes that allow it. CUDA 13.5's does not (`pip install nvidia-cuda-sanitizer-api`). So racecheck takes whole training
# steps in bf16 at odd sizes, over all kernels, the libraries' too; steps in fp32 and the tests of ops that call no
# library, over quern's own; and, with RACE_BUILD and SANITIZER, steps in each other precision, over quern's own.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

build=${BUILD:-build/release}
race_build=${RACE_BUILD:-}
ptx_build=${PTX_BUILD:-build/ptx89}
newer=${SANITIZER:-}
quern=$build/bin/quern
tests=$build/bin/device_cuda_test
logs=build/gpu-checks
sanitizer=${newer:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}
failures=0
checks=0
quick=0
[[ ${1:-} == --quick ]] && { quick=1; shift; }
only=${1:-*}

for file in "$quern" "$tests" "$sanitizer"; do
  [[ -x $file ]] || { echo "gpu_checks.sh: $file is not there; build first, with a CUDA toolkit" >&2; exit 2; }
done
mkdir -p "$logs"

# shellcheck disable=SC2053  # a pattern
wanted() { [[ $1 == $only ]]; }

# check NAME PATTERN COMMAND...: passes when the command does; shows the last line of its log that matches.
check() {
  wanted "$1" || return 0
  checks=$((checks + 1))
  local name=$1 pattern=$2 log=$logs/$1.txt started=$SECONDS status=ok
  shift 2
  "$@" >"$log" 2>&1 || { status="FAILED ($?)"; failures=$((failures + 1)); }
  printf '%-28s %-12s %5d s  %s\n' "$name" "$status" $((SECONDS - started)) "$(grep -E "$pattern" "$log" | tail -n 1)"
}

# Two layers with tied embeddings and biases. Timing GEMMs under a sanitizer shows nothing.
tiny="model.qwen2.num_hidden_layers=2 model.qwen2.num_attention_heads=2 model.qwen2.num_key_value_heads=1
  train.micro_batch=2 train.sequence=128 train.accumulation=2
  device.cuda.matmul_candidates=1 device.cuda.matmul_cache=false"
# Heads that cuDNN takes; and rows of no multiple of 16 bytes, for which neither the library nor quern's fused GEMMs
# have TMA: those are raced by their tests.
even="model.qwen2.hidden_size=128 model.qwen2.intermediate_size=256 model.qwen2.vocab_size=1024"
odd="model.qwen2.hidden_size=132 model.qwen2.intermediate_size=258 model.qwen2.vocab_size=1022"
# A K that is long enough for every fused form.
fused="model.qwen2.hidden_size=896 model.qwen2.num_attention_heads=14 model.qwen2.num_key_value_heads=2"
declare -A variants=(
  [bf16]=""
  [fp32]="precision.id=fp32 optimizer.master=fp32 optimizer.gradient=fp32 optimizer.adamw.moments=fp32"
  [own_attention]="device.cuda.attention=own"
  [cudnn_attention]="device.cuda.attention=cudnn"
  [documents]="data.documents=masked"
  [e4m3]="precision.id=e4m3"
  [e4m3_fused]="precision.id=e4m3 $fused"
  [int8]="precision.id=int8 $fused"
  [bf16_fused]="$fused"
  [squares]="precision.id=e4m3 precision.e4m3.activation_scaling=square precision.e4m3.gradient_scaling=square $fused"
  [blocks]="precision.id=e4m3 precision.e4m3.activation_scaling=block precision.e4m3.gradient_scaling=block $fused"
)

# steps SETTING...: sets `steps` to the command that runs two training steps of the tiny model so, and `raced` to the same of
# RACE_BUILD with a single layer.
steps() {
  local setting
  steps=("$quern" bench configs/qwen2.5/0.5b.toml --steps 2)
  for setting in $tiny "$@"; do steps+=(--set "$setting"); done
  raced=("$race_build/bin/quern" "${steps[@]:1}" --set model.qwen2.num_hidden_layers=1 --set train.accumulation=1)
}

# shellcheck disable=SC2317  # called by name
sanitize() { # tool arguments... -- program...
  local tool=()
  while [[ $1 != -- ]]; do tool+=("$1"); shift; done
  shift
  "$sanitizer" --error-exitcode 9 --print-limit 100 "${tool[@]}" "$@"
}

race=(--tool racecheck --racecheck-report all)
own=(--kernel-regex kns=quern)
# Cases that put the device in an error state on purpose, or ask for memory that is not there, are left out.
faulty='memory*capture,a GPU that cannot*,a GEMM without room*'
library='matmul*,lm_loss*,save_state*,attention*cuDNN*,attention in chunks*,documents*' # cases that call one
# CUDA 13.0's racecheck fails with a hardware exception in GEMMs that quantize; synccheck takes them.
library+=',GEMMs that quantize swiglu*,GEMMs with block scales that quantize swiglu*'
library+=',own GEMMs with block*,blocks of zeros*,bits of an own GEMM*' # see RACE_BUILD
library+=',candidates beyond*,a large GEMM is searched*,a wide search*,GEMMs that are searched*'
library+=',GEMMs fused with swiglu give the CPU*'
hopper='attention*Hopper*'

not_run() { ! wanted "$1" || printf '%-28s %-12s %s\n' "$1" "not run" "$2"; }

check tests 'tests passed|tests failed' ctest --test-dir "$build" -L gpu --output-on-failure --no-tests=error
! wanted tests ||
  printf '%-28s %s\n' "" "$(grep -c Skipped "$logs/tests.txt") of them skipped; the reasons are in $logs/tests.txt"
for variant in bf16 fp32 own_attention cudnn_attention bf16_fused e4m3 e4m3_fused int8 squares blocks; do
  # shellcheck disable=SC2086  # words
  steps $even ${variants[$variant]}
  check "memcheck_$variant" 'ERROR SUMMARY' sanitize --tool memcheck -- "${steps[@]}"
  case $variant in
    fp32) check racecheck_fp32 'RACECHECK SUMMARY' sanitize "${race[@]}" "${own[@]}" -- "${steps[@]}" ;;
    *)
      if [[ -n $newer && -n $race_build ]]; then
        check "racecheck_$variant" 'RACECHECK SUMMARY' sanitize "${race[@]}" "${own[@]}" -- "${raced[@]}"
      else
        not_run "racecheck_$variant" "wants RACE_BUILD, and CUDA 13.5's SANITIZER"
      fi
      ;;
  esac
done
# shellcheck disable=SC2086  # words
steps $odd device.cuda.attention=own
check racecheck_bf16_odd 'RACECHECK SUMMARY' sanitize "${race[@]}" -- "${steps[@]}"
if [[ $only == ptx_* || $only == '*' ]]; then
  [[ -x $ptx_build/bin/device_cuda_test ]] || {
    check ptx_configure 'Build files' cmake -S . -B "$ptx_build" -G Ninja -DQUERN_CUDA_ARCHITECTURES=89-virtual
    check ptx_build '.' cmake --build "$ptx_build" --target quern_cli quern_demo device_cuda_test quern_device_cuda \
      quern_model_qwen2 quern_precision_e4m3 quern_precision_int8
  }
  check ptx_tests 'test cases' "$ptx_build/bin/device_cuda_test"
  check ptx_contracts 'contracts|hold' "$ptx_build/bin/quern" plugins check "$ptx_build/plugins/device/libquern_cuda.so"
  for precision in bf16 e4m3 int8; do
    check "ptx_train_$precision" 'tok/s' "$ptx_build/bin/quern" bench configs/qwen2.5/0.5b.toml --steps 10 \
      --set device.id=cuda --set "precision.id=$precision"
    wanted "ptx_train_$precision" && ! grep -q 'has only PTX' "$logs/ptx_train_$precision.txt" && {
      echo "  it did not say that the driver compiles its kernels"
      failures=$((failures + 1))
    }
  done
fi
if [[ $quick == 0 ]]; then
  check racecheck_ops 'RACECHECK SUMMARY' sanitize "${race[@]}" "${own[@]}" -- "$tests" \
    -tce="$faulty,$library,$hopper"
  if [[ -n $race_build ]]; then
    check racecheck_attention 'RACECHECK SUMMARY' sanitize "${race[@]}" "${own[@]}" -- \
      "$race_build/bin/device_cuda_test" -tc="$hopper"
    check racecheck_products 'RACECHECK SUMMARY' sanitize "${race[@]}" "${own[@]}" -- \
      "$race_build/bin/quern" bench products configs/qwen2.5/0.5b.toml --sizes 144x272x512 --set device.id=cuda \
      --set device.cuda.products=own
    ! wanted racecheck_products || [[ $(grep -cE '(x128|squares) +(NT|TT) ' "$logs/racecheck_products.txt") == 8 ]] || {
      echo "  of eight with block or tile scales, in each format three K-major and one not, it did not run each"
      failures=$((failures + 1))
    }
  else
    for name in racecheck_attention racecheck_products; do
      not_run "$name" "RACE_BUILD names no build with -DQUERN_RACECHECK=ON"
    done
  fi
  check memcheck_tests 'ERROR SUMMARY' sanitize --tool memcheck -- "$tests" -tce="$faulty"
fi
[[ $checks -gt 0 ]] || { echo "gpu_checks.sh: no check is named '$only'" >&2; exit 2; }
echo "$failures of $checks failed"
exit $((failures > 0))
