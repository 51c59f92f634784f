// Matmuls of few inner dimensions with columns of a wide matrix: add_matmul, columns_matmul and columns_weight_grad.
// Sums in fp32, rounded once; operands of other dtypes are converted to panels in the workspace.

#include "primitives/rows.h"
#include "products/blas.h"
#include "runtime/kernels.h"
#include "runtime/operand_check.h"
#include "runtime/support.h"
#include "shared/operands/op_checks.h"

namespace quern::cpu {

namespace {

using operands::NarrowMatmul;
using Read = MatrixView::Read;

std::int64_t panel_of(const Operand& operand, std::int64_t columns) {
  return operand.dtype == DType::f32 ? 0 : operand.extents[0] * columns;
}

/// Columns of a matrix as floats.
MatrixView columns_of(const View& x, std::int64_t first, std::int64_t columns, Read read, Workspace& workspace) {
  if (x.dtype == DType::f32) return {x.as<float>() + first, x.columns(), read};
  float* panel = workspace.floats(x.rows() * columns);
#pragma omp parallel for schedule(static)
  for (std::int64_t row = 0; row < x.rows(); ++row) load(x, row * x.columns() + first, columns, panel + row * columns);
  return {panel, columns, read};
}

MatrixView all_of(const View& x, Read read, Workspace& workspace) {
  return columns_of(x, 0, x.columns(), read, workspace);
}

/// Columns of y, or all of them, (+)= factor a b, of k inner dimensions.
void multiply(const MatrixView& a, const MatrixView& b, std::int64_t k, float factor, const View& y, std::int64_t first,
              std::int64_t columns, bool adds, Workspace& workspace) {
  if (y.dtype == DType::f32)
    return gemm(y.rows(), columns, k, factor, a, b, adds ? 1.0f : 0.0f, y.as<float>() + first, y.columns());
  float* sums = workspace.floats(y.rows() * columns);
  gemm(y.rows(), columns, k, factor, a, b, 0, sums, columns);
#pragma omp parallel for schedule(static)
  for (std::int64_t row = 0; row < y.rows(); ++row)
    (adds ? accumulate : store)(y, row * y.columns() + first, columns, sums + row * columns);
}

// y (N, C), a (N, r), b (P, r) or (r, P) -> y + factor a op(b) at columns [first, first + P)
Launch prepare_add_matmul(const OpInstance& op) {
  return [p = NarrowMatmul(op)](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    const View &y = in[0], &sum = out[0];
    if (sum.data != y.data) {
#pragma omp parallel for schedule(static)
      for (std::int64_t row = 0; row < y.rows(); ++row) store_row(sum, row, load_row(y, row, scratch(0, y.columns())));
    }
    Workspace workspace(exec.workspace);
    const MatrixView a = all_of(in[1], Read::plain, workspace);
    const MatrixView b = all_of(in[2], p.turned ? Read::transposed : Read::plain, workspace);
    multiply(a, b, p.rank, p.factor, sum, p.first, p.columns, true, workspace);
  };
}

// x (N, C), b (P, r) -> factor x b, of columns [first, first + P): (N, r)
Launch prepare_columns_matmul(const OpInstance& op) {
  return [p = NarrowMatmul(op)](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    Workspace workspace(exec.workspace);
    const MatrixView x = columns_of(in[0], p.first, p.columns, Read::plain, workspace);
    const MatrixView b = all_of(in[1], Read::plain, workspace);
    multiply(x, b, p.columns, p.factor, out[0], 0, p.rank, false, workspace);
  };
}

// x (N, C), a (N, r) -> factor x^T a, of columns [first, first + P): (P, r)
Launch prepare_columns_weight_grad(const OpInstance& op) {
  return [p = NarrowMatmul(op), adds = op.outputs[0].accumulate](std::span<const View> in, std::span<const View> out,
                                                                 const Exec& exec) {
    Workspace workspace(exec.workspace);
    const MatrixView x = columns_of(in[0], p.first, p.columns, Read::transposed, workspace);
    const MatrixView a = all_of(in[1], Read::plain, workspace);
    multiply(x, a, p.rows, p.factor, out[0], 0, p.rank, adds, workspace);
  };
}

OpSupport query(const OpInstance& op) {
  const bool one_matrix = op.kind == "columns_matmul";
  const auto check = operands::check_narrow_matmul(OperandCheck(op, one_matrix ? 2 : 3, 1), op);
  if (!check.ok()) return check.support();
  const NarrowMatmul p(op);
  std::size_t bytes = 0;
  if (op.kind != "add_matmul") bytes += float_bytes(panel_of(op.inputs[0], p.columns));
  if (op.kind != "columns_weight_grad")
    bytes += float_bytes(panel_of(op.inputs[one_matrix ? 1 : 2], p.turned ? p.rank : p.columns));
  if (!one_matrix) bytes += float_bytes(panel_of(op.inputs[1], p.rank));
  const Operand& y = op.outputs[0];
  bytes += float_bytes(panel_of(y, op.kind == "add_matmul" ? p.columns : p.rank));
  return check.support(bytes);
}

}  // namespace

void add_narrow_matmul_ops(OpTable& table) {
  table["add_matmul"] = {prepare_add_matmul, query};
  table["columns_matmul"] = {prepare_columns_matmul, query};
  table["columns_weight_grad"] = {prepare_columns_weight_grad, query};
}

}  // namespace quern::cpu
