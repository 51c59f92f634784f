// RMS norm and its gradient with the residual add beside them, quantized as they are made: a row is in registers when
// its quantized values are written. Their transpose is a second launch, of bytes.

#include <type_traits>

#include "norms/norm_ops.h"
#include "norms/rms_norm.cuh"
#include "quantization/quantize_ops.h"
#include "quantization/transpose.h"

namespace quern::cuda {

namespace {

/// Follows a norm's launches: the transpose of its quantized values, which are in the workspace where no op reads
/// them.
struct Codes {
  Codes(const OpInstance& op, const QuantizePlan& plan, Matrix matrix)
      : size(matrix), in_workspace(plan.has_t(op) && !plan.has_q(op)) {}
  std::size_t workspace_bytes() const {
    return QuantizePlan::kWorkspace + (in_workspace ? static_cast<std::size_t>(size.rows * size.columns) : 0);
  }
  std::uint8_t* of(const QuantizeArguments& args, const Exec& exec) const {
    return in_workspace ? static_cast<std::uint8_t*>(exec.workspace) + QuantizePlan::kWorkspace : args.q;
  }
  Matrix size;
  bool in_workspace;
};

/// Runs the launches of a plan, then the transpose: launch(arguments) quantizes where arguments.q says.
template <class LaunchPass>
void run_rows(const QuantizePlan& plan, const Codes& codes, std::span<const View> in, std::span<const View> out,
              const Exec& exec, LaunchPass launch) {
  std::uint8_t *q = nullptr, *t = nullptr;
  plan.run(in, out, exec, [&](QuantizeArguments args) {
    args.q = q = codes.of(args, exec);
    t = args.t;
    launch(args);
  });
  if (t) transpose_bytes(q, t, codes.size.rows, codes.size.columns, stream_of(exec));
}

template <bool kAdd>
QuantizePlan norm_plan(const OpInstance& op, ScaleSource source) {
  return QuantizePlan(op, source, kAdd ? 3 : 2, kAdd ? 3 : 2, matrix_of(op, 0));
}

// x (N, C), weight (C) -> y (N, C), rstd (N) f32; kAdd: x, added (N, C), weight (C) -> sum, y (N, C), rstd (N) f32;
// and the quantizing part's of y
template <bool kAdd>
Launch prepare_norm(const OpInstance& op, CudaContext& context, ScaleSource source) {
  const Matrix size = matrix_of(op, 0);
  const auto eps = static_cast<float>(op.attributes.real("eps"));
  const QuantizePlan plan = norm_plan<kAdd>(op, source);
  const Codes codes(op, plan, size);
  auto kernels = load_rows<NormArguments>(
      size.columns, op.inputs[0].dtype, context.multiprocessors,
      [](auto, auto packs, auto access) { return &rms_norm_kernel<bf16, packs(), access(), kAdd, true>; });
  load_transpose_bytes();
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    run_rows(plan, codes, in, out, exec, [&](const QuantizeArguments& quantize) {
      const bool again = quantize.pass == Pass::again;
      NormArguments args{.x = in[0].data,
                         .added = kAdd ? in[1].data : nullptr,
                         .weight = in[kAdd ? 2 : 1].data,
                         .sum = kAdd && !again ? out[0].data : nullptr,
                         .y = again ? nullptr : out[kAdd ? 1 : 0].data,
                         .rstd = again ? nullptr : out[kAdd ? 2 : 1].as<float>(),
                         .rows = size.rows,
                         .columns = static_cast<int>(size.columns),
                         .eps = eps,
                         .quantize = quantize};
      const auto& kernel =
          kernels.pick({args.x, args.added, args.weight, out[0].data, out[kAdd ? 1 : 0].data, quantize.q});
      kernel.launch(kernel.persistent(ceil_divide(size.rows, kernels.teams)), stream_of(exec), args);
    });
  };
}

template <bool kAdd>
OpSupport query_norm(const OpInstance& op, ScaleSource source) {
  const auto [rows, columns] = matrix_of(op, 0);
  const Extents stream{rows, columns};
  const QuantizePlan plan = norm_plan<kAdd>(op, source);
  OperandCheck check(op, plan.inputs(), plan.outputs());
  check_fused(check, op);
  check.input(0, kAdd ? "a" : "x", stream);
  if (kAdd) check.input(1, "b", stream).output(0, "sum", stream);
  const std::size_t first = kAdd ? 1 : 0;
  check.input(first + 1, "weight", {columns}).output(first, "y", stream).output(first + 1, "rstd", {rows}, DType::f32);
  plan.check(check, op);
  check.that(fits_row(op, 0), kRowTooLong);
  return check.support(check.ok() ? Codes(op, plan, {rows, columns}).workspace_bytes() : 0);
}

QuantizePlan grad_plan(const OpInstance& op, ScaleSource source) {
  return QuantizePlan(op, source, 5, 3, matrix_of(op, 1));
}

/// Bytes of the partial sums of dweight; they follow the quantized values.
std::size_t partials_of(const OpInstance& op) {
  const auto [rows, columns] = matrix_of(op, 1);
  return op.outputs[1].present ? row_partial_bytes(rows, columns, op.inputs[1].dtype) : 0;
}
constexpr std::size_t aligned_256(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

// dy, x (N, C), weight (C), rstd (N) f32, e (N, C) -> dx (N, C), dweight (C), sum = dx + e, and the quantizing part's
// of sum.
Launch prepare_grad(const OpInstance& op, CudaContext& context, ScaleSource source) {
  const Matrix size = matrix_of(op, 1);
  const bool accumulate = op.outputs[1].accumulate;
  const QuantizePlan plan = grad_plan(op, source);
  const Codes codes(op, plan, size);
  const DType type = op.inputs[1].dtype;
  const auto kernels = load_rows<GradArguments>(
      size.columns, type, context.multiprocessors,
      [](auto, auto packs, auto access) { return &rms_norm_grad_kernel<bf16, packs(), access(), true, true>; });
  const std::int64_t blocks = rms_norm_grad_blocks(size, type, context.multiprocessors);
  load_column_sums();
  load_transpose_bytes();
  const std::size_t partials_at = aligned_256(codes.workspace_bytes());
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    const View& dweight = out[1];
    auto* partials = reinterpret_cast<float*>(static_cast<char*>(exec.workspace) + partials_at);
    run_rows(plan, codes, in, out, exec, [&](const QuantizeArguments& quantize) {
      const bool again = quantize.pass == Pass::again;
      GradArguments args{.dy = in[0].data,
                         .x = in[1].data,
                         .weight = in[2].data,
                         .added = in[4].data,
                         .rstd = in[3].as<const float>(),
                         .dx = again ? nullptr : out[0].data,
                         .sum = again ? nullptr : out[2].data,
                         .partials = dweight && !again ? partials : nullptr,
                         .rows = size.rows,
                         .columns = static_cast<int>(size.columns),
                         .quantize = quantize};
      kernels.pick({args.dy, args.x, args.weight, args.added, out[0].data, out[2].data, quantize.q})
          .launch(blocks, stream_of(exec), args);
    });
    if (dweight) sum_partial_rows(partials, blocks, size.columns, dweight, accumulate, stream_of(exec));
  };
}

OpSupport query_grad(const OpInstance& op, ScaleSource source) {
  const auto [rows, columns] = matrix_of(op, 1);
  const Extents stream{rows, columns};
  const QuantizePlan plan = grad_plan(op, source);
  OperandCheck check(op, plan.inputs(), plan.outputs(), 1);
  check_fused(check, op);
  check.input(0, "dy", stream).input(1, "x", stream).input(2, "weight", {columns});
  check.input(3, "rstd", {rows}, DType::f32).input(4, "e", stream);
  check.output(0, "dx", stream).sum(1, "dweight", {columns}).output(2, "sum", stream);
  plan.check(check, op);
  check.that(fits_row(op, 1), kRowTooLong);
  if (!check.ok()) return check.support();
  return check.support(aligned_256(Codes(op, plan, {rows, columns}).workspace_bytes()) + partials_of(op));
}

}  // namespace

void add_norm_quantize_ops(OpTable& table) {
  add_quantize_kinds(table, "rms_norm", prepare_norm<false>, query_norm<false>);
  add_quantize_kinds(table, "add_rms_norm", prepare_norm<true>, query_norm<true>);
  add_quantize_kinds(table, "rms_norm_grad_add", prepare_grad, query_grad);
}

}  // namespace quern::cuda
