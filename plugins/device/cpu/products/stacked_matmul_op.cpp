// stacked_matmul: of each matrix y = alpha op(a) op(b) + beta c, accumulated in fp32, rounded once.

#include <algorithm>

#include "primitives/rows.h"
#include "products/blas.h"
#include "runtime/kernels.h"
#include "runtime/operand_check.h"
#include "runtime/support.h"
#include "shared/operands/op_checks.h"

namespace quern::cpu {

namespace {

using operands::StackedMatmul;

/// Floats of workspace for one matrix of a view; none where it is used in place.
std::int64_t panel(const Operand& operand) {
  return operand.dtype == DType::f32 || operand.extents[0] == 0 ? 0 : operand.count() / operand.extents[0];
}

OpSupport query(const OpInstance& op) {
  OperandCheck check(op, std::clamp<std::size_t>(op.inputs.size(), 2, 3), 1);
  operands::check_stacked_matmul(check, op);
  if (!check.ok()) return check.support();
  return check.support(float_bytes(panel(op.inputs[0])) + float_bytes(panel(op.inputs[1])) +
                       float_bytes(panel(op.outputs[0])));
}

View matrix(const View& stack, std::int64_t index) {
  View one = stack;
  one.extents = {stack.extents[1], stack.extents[2]};
  one.data = static_cast<char*>(stack.data) + index * byte_count(one.extents, stack.dtype);
  return one;
}

Launch prepare(const OpInstance& op) {
  const std::int64_t of_a = panel(op.inputs[0]), of_b = panel(op.inputs[1]), of_y = panel(op.outputs[0]);
  return [=, s = StackedMatmul(op)](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    Workspace workspace(exec.workspace);
    float *panel_a = workspace.floats(of_a), *panel_b = workspace.floats(of_b), *panel_y = workspace.floats(of_y);
    auto read = [](bool transposed) { return transposed ? MatrixView::Read::transposed : MatrixView::Read::plain; };
    for (std::int64_t i = 0; i < s.count; ++i) {
      const float *a = load_all(matrix(in[0], i), panel_a), *b = load_all(matrix(in[1], i), panel_b);
      const View y = matrix(out[0], i);
      float* sums = target(y, 0, panel_y);
      if (s.adds)
        if (const float* c = load_all(matrix(in[2], i), sums); c != sums) std::copy_n(c, y.count(), sums);
      gemm(s.m, s.n, s.k, s.alpha, {a, s.transpose_a ? s.m : s.k, read(s.transpose_a)},
           {b, s.transpose_b ? s.k : s.n, read(s.transpose_b)}, s.adds ? s.beta : 0.0f, sums, s.n);
      store(y, 0, y.count(), sums);
    }
  };
}

}  // namespace

void add_stacked_matmul_op(OpTable& table) { table["stacked_matmul"] = {prepare, query}; }

}  // namespace quern::cpu
