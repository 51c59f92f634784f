// Which own GEMM takes a key, and its operands. Linked only where Hopper's code is built.

#include "products/own/own_matmul.h"

#include <utility>

namespace quern::cuda {

namespace {

const OwnMatmul& form_of(const MatmulKey& key) {
  if (key.a == DType::bf16)
    return key.transpose_b ? kBf16Matmul : key.transpose_a ? kBf16MnMajorABMatmul : kBf16MnMajorBMatmul;
  if (key.a == DType::i8) return kI8Matmul;
  const bool e5m2 = (swaps_operands(key) ? key.b : key.a) == DType::e5m2;
  if (key.squares && key.transpose_a) return e5m2 ? kE5m2TileScalesMnMajorAMatmul : kE4m3TileScalesMnMajorAMatmul;
  if (key.squares) return e5m2 ? kE5m2TileScalesMatmul : kE4m3TileScalesMatmul;
  if (key.scales == ScaleMode::block) return e5m2 ? kE5m2BlockScalesMatmul : kE4m3BlockScalesMatmul;
  if (key.scales == ScaleMode::square_block) return e5m2 ? kE5m2BlockTileScalesMatmul : kE4m3BlockTileScalesMatmul;
  if (swaps_operands(key)) return e5m2 ? kE5m2MnMajorBMatmul : kE4m3MnMajorBMatmul;
  if (key.transpose_a && !key.fast_accumulation) return e5m2 ? kE5m2MnMajorAFp32Matmul : kE4m3MnMajorAFp32Matmul;
  if (key.transpose_a) return e5m2 ? kE5m2MnMajorAMatmul : kE4m3MnMajorAMatmul;
  return e5m2 ? kE5m2Matmul : kE4m3Matmul;
}

OwnOperands operands_of(const MatmulKey& key, const MatmulOperands& o) {
  OwnOperands operands{.rows = key.m,
                       .columns = key.n,
                       .depth = key.k,
                       .a_type = key.a,
                       .b_type = key.b,
                       .a = o.a,
                       .b = o.b,
                       .bias = key.bias ? o.bias : nullptr,
                       .a_stride = key.stride_a,
                       .b_stride = key.stride_b,
                       .y_stride = key.stride_y,
                       .scale_a = o.scale_a,
                       .scale_b = o.scale_b,
                       .scales = key.scales,
                       .add = key.accumulate,
                       .y = o.y,
                       .workspace = o.workspace};
  if (swaps_operands(key)) {
    std::swap(operands.rows, operands.columns);
    std::swap(operands.a_type, operands.b_type);
    std::swap(operands.a, operands.b);
    std::swap(operands.a_stride, operands.b_stride);
    std::swap(operands.scale_a, operands.scale_b);
  }
  return operands;
}

}  // namespace

void load_own_matmul(const MatmulKey& key) { form_of(key).load(); }

void run_own_matmul(const MatmulKey& key, const MatmulOperands& operands, int multiprocessors, cudaStream_t stream) {
  form_of(key).run(operands_of(key, operands), multiprocessors, stream);
}

}  // namespace quern::cuda
