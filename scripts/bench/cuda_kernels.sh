#!/usr/bin/env bash
# The device's kernels at the sizes of real models, in a few minutes on one GPU: the whole optimizer update, norms,
# embedding, rope, activations and quantization beside the copy rate; attention and LM head by chunk size; matmuls,
# the best that the library lists beside the one that is taken.
#
#   scripts/bench/cuda_kernels.sh [BUILD_DIRECTORY]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
bench=${1:-build/release}/bin/cuda_kernels_bench

"$bench" update "adamw (32768, 896)" "norm (32768, 896)" "norm_grad (32768, 896)" "norm_grad_add (32768, 896)" \
  "embedding" "sum_squares (" "swiglu (32768" "swiglu_grad (32768" "rope (32768" "rope_grad" "column_sum (" "gelu" \
  "head_norm" "quantize_delayed ("
"$bench" --table attention loss products
