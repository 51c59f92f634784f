// quantize_blocks, quantize_squares: x (N, C) to 8 bits, row by row and transposed, with scales for blocks of 128
// elements or of 128 x 128.

#include "quantization/block_quantize.cuh"
#include "quantization/quantize_ops.h"

namespace quern::cuda {

namespace {

Launch prepare(const OpInstance& op, CudaContext& context) {
  const Matrix size = matrix_of(op, 0);
  auto make = [](std::span<const View> in) { return Copy{in[0].data}; };
  return is_square(op) ? prepare_blocks<Copy, true>(op, context, size.rows, size.columns, {}, make)
                       : prepare_blocks<Copy>(op, context, size.rows, size.columns, {}, make);
}

OpSupport query(const OpInstance& op, const CudaTraits&) {
  const auto [rows, columns] = matrix_of(op, 0);
  OperandCheck check(op, 1, 4);
  check.input(0, "x", extents_of(op, 0)).that(extents_of(op, 0).size() == 2, "needs a matrix x");
  check_blocks(check, op, 0, rows, columns);
  return check.support();
}

}  // namespace

void add_quantize_blocks_op(OpTable& table) { table["quantize_blocks"] = table["quantize_squares"] = {prepare, query}; }

}  // namespace quern::cuda
