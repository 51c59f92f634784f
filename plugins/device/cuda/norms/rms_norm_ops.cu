// RMS norm over the channels of each token, its gradient, and both fused with the residual add beside them.
// Zhang & Sennrich, "Root Mean Square Layer Normalization" (2019). Operands are read once and kept in registers; every
// output may be an input's memory, since a thread writes only what it alone has read.

#include "norms/norm_ops.h"
#include "norms/rms_norm.cuh"
#include "shared/operands/op_checks.h"

namespace quern::cuda {

namespace {

// x (N, C), weight (C) -> y (N, C), rstd (N) f32; kAdd: x, added (N, C), weight (C) -> sum, y (N, C), rstd (N) f32
template <bool kAdd>
Launch prepare_norm(const OpInstance& op, CudaContext& context) {
  const Matrix size = matrix_of(op, 0);
  const auto eps = static_cast<float>(op.attributes.real("eps"));
  auto kernels = load_rows<NormArguments>(size.columns, op.inputs[0].dtype, context.multiprocessors,
                                          [](auto element, auto packs, auto access) {
                                            return &rms_norm_kernel<decltype(element), packs(), access(), kAdd, false>;
                                          });
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    if (size.rows == 0) return;
    NormArguments args{.x = in[0].data,
                       .added = kAdd ? in[1].data : nullptr,
                       .weight = in[kAdd ? 2 : 1].data,
                       .sum = kAdd ? out[0].data : nullptr,
                       .y = out[kAdd ? 1 : 0].data,
                       .rstd = static_cast<float*>(out[kAdd ? 2 : 1].data),
                       .rows = size.rows,
                       .columns = static_cast<int>(size.columns),
                       .eps = eps};
    const auto& kernel = kernels.pick({args.x, args.added, args.weight, args.sum, args.y});
    kernel.launch(kernel.persistent(ceil_divide(size.rows, kernels.teams)), stream_of(exec), args);
  };
}

template <bool kAdd>
RowKernels<GradArguments> load_grad(std::int64_t columns, DType type, int multiprocessors) {
  return load_rows<GradArguments>(columns, type, multiprocessors, [](auto element, auto packs, auto access) {
    return &rms_norm_grad_kernel<decltype(element), packs(), access(), kAdd, false>;
  });
}

// dy, x (N, C), weight (C), rstd (N) f32 -> dx (N, C), dweight (C); kAdd: also e (N, C) -> dx + e
template <bool kAdd>
Launch prepare_rms_norm_grad(const OpInstance& op, CudaContext& context) {
  const Matrix size = matrix_of(op, 1);
  const DType type = op.inputs[1].dtype;
  const bool accumulate = op.outputs[1].accumulate;
  const auto kernels = load_grad<kAdd>(size.columns, type, context.multiprocessors);
  const std::int64_t blocks = rms_norm_grad_blocks(size, type, context.multiprocessors);
  load_column_sums();
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    const View& dweight = out[1];
    GradArguments args{.dy = in[0].data,
                       .x = in[1].data,
                       .weight = in[2].data,
                       .added = kAdd ? in[4].data : nullptr,
                       .rstd = static_cast<const float*>(in[3].data),
                       .dx = out[0].data,
                       .sum = kAdd ? out[2].data : nullptr,
                       .partials = dweight ? static_cast<float*>(exec.workspace) : nullptr,
                       .rows = size.rows,
                       .columns = static_cast<int>(size.columns)};
    kernels.pick({args.dy, args.x, args.weight, args.added, args.dx, args.sum}).launch(blocks, stream_of(exec), args);
    if (dweight) sum_partial_rows(args.partials, blocks, size.columns, dweight, accumulate, stream_of(exec));
  };
}

OpSupport query_rms_norm(const OpInstance& op, bool added) {
  OperandCheck check(op, added ? 3 : 2, added ? 3 : 2);
  operands::check_norm(check, op, false, added);
  return check.that(fits_row(op, 0), kRowTooLong).support();
}

OpSupport query_rms_norm_grad(const OpInstance& op, bool added) {
  const auto [rows, columns] = matrix_of(op, 1);
  OperandCheck check(op, added ? 5 : 4, added ? 3 : 2);
  operands::check_norm_grad(check, op, false, added);
  check.that(fits_row(op, 1), kRowTooLong);
  bool sums = check.ok() && op.outputs[1].present;
  return check.support(sums ? row_partial_bytes(rows, columns, op.inputs[1].dtype) : 0);
}

}  // namespace

Launch prepare_rms_norm(const OpInstance& op, CudaContext& context, bool added) {
  return (added ? prepare_norm<true> : prepare_norm<false>)(op, context);
}

std::int64_t rms_norm_grad_blocks(const Matrix& size, DType type, int multiprocessors) {
  const auto plain = load_grad<false>(size.columns, type, multiprocessors),
             added = load_grad<true>(size.columns, type, multiprocessors);
  const std::int64_t work = std::max<std::int64_t>(1, ceil_divide(size.rows, plain.teams));
  return std::min({kMostPartials, work, std::int64_t{plain.resident()}, std::int64_t{added.resident()}});
}

void add_rms_norm_ops(OpTable& table) {
  auto query = [](bool added) {
    return [added](const OpInstance& op, const CudaTraits&) { return query_rms_norm(op, added); };
  };
  auto query_grad = [](bool added) {
    return [added](const OpInstance& op, const CudaTraits&) { return query_rms_norm_grad(op, added); };
  };
  table["rms_norm"] = {prepare_norm<false>, query(false)};
  table["add_rms_norm"] = {prepare_norm<true>, query(true)};
  table["rms_norm_grad"] = {prepare_rms_norm_grad<false>, query_grad(false)};
  table["rms_norm_grad_add"] = {prepare_rms_norm_grad<true>, query_grad(true)};
}

void add_norm_ops(OpTable& table) {
  add_rms_norm_ops(table);
  add_layer_norm_ops(table);
  add_head_norm_ops(table);
}

}  // namespace quern::cuda
