// RMS norm and its gradient with the residual add beside them, quantized as they are made: a row is in registers when
// its codes are written, and in shared memory until its group's transpose is.

#include <type_traits>

#include "norm_ops.h"
#include "quantize_ops.h"
#include "rms_norm.cuh"

namespace quern::cuda {

namespace {

/// Static shared memory of the kernels, at most.
constexpr std::size_t kStaticShared = 1024;

/// How many rows of codes a block of these kernels holds to write them transposed.
std::uint8_t held_rows(const RowShape& shape, const Matrix& size, const CudaContext& context) {
  return RowTile::most_rows(rows_at_once(shape.teams, size.rows), shape.teams, size.columns,
                            context.traits.shared_bytes - kStaticShared);
}

/// Kernels that can write the plan's format: those that read by packs have code for i8 only where it is wanted.
template <class Arguments, class Select>
RowKernels<Arguments> load_quantizing(const QuantizePlan& plan, std::int64_t columns, DType type, CudaContext& context,
                                      std::size_t shared, Select select) {
  auto load = [&](auto formats) {
    return load_rows<Arguments>(
        columns, type, context.multiprocessors,
        [select](auto element, auto packs, auto access) {
          constexpr Formats kFormats = access() == Access::vector ? decltype(formats)::value : Formats::any;
          return select(element, packs, access, std::type_identity<Quantizer<kFormats>>{});
        },
        shared);
  };
  return plan.format() == DType::i8 ? load(std::integral_constant<Formats, Formats::any>{})
                                    : load(std::integral_constant<Formats, Formats::float8>{});
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
  const DType type = op.inputs[0].dtype;
  const std::uint8_t held = held_rows(row_shape(size.columns, type), size, context);
  const std::size_t shared = plan.has_t(op) ? RowTile::bytes(held, size.columns) : 0;
  auto kernels = load_quantizing<NormArguments>(
      plan, size.columns, type, context, shared, [](auto element, auto packs, auto access, auto codes) {
        return &rms_norm_kernel<decltype(element), packs(), access(), kAdd, typename decltype(codes)::type>;
      });
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    plan.run(in, out, exec, [&](QuantizeArguments quantize) {
      quantize.held = held;
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
      kernel.launch(kernel.persistent(ceil_divide(size.rows, rows_at_once(kernels.teams, size.rows))), stream_of(exec),
                    args);
    });
  };
}

template <bool kAdd>
OpSupport query_norm(const OpInstance& op, ScaleSource source) {
  const auto [rows, columns] = matrix_of(op, 0);
  const Extents stream{rows, columns};
  const QuantizePlan plan = norm_plan<kAdd>(op, source);
  OperandCheck check(op, plan.inputs(), plan.outputs());
  check.input(0, kAdd ? "a" : "x", stream);
  if (kAdd) check.input(1, "b", stream).output(0, "sum", stream);
  const std::size_t first = kAdd ? 1 : 0;
  check.input(first + 1, "weight", {columns}).output(first, "y", stream).output(first + 1, "rstd", {rows}, DType::f32);
  plan.check(check, op);
  check.that(fits_row(op, 0), kRowTooLong);
  return check.support(QuantizePlan::kWorkspace);
}

QuantizePlan grad_plan(const OpInstance& op, ScaleSource source) {
  return QuantizePlan(op, source, 5, 3, matrix_of(op, 1));
}

// dy, x (N, C), weight (C), rstd (N) f32, e (N, C) -> dx (N, C), dweight (C), sum = dx + e, and the quantizing part's
// of sum. Blocks are those of the op that does not quantize, so that dweight's partial sums are the same.
Launch prepare_grad(const OpInstance& op, CudaContext& context, ScaleSource source) {
  const Matrix size = matrix_of(op, 1);
  const bool accumulate = op.outputs[1].accumulate;
  const QuantizePlan plan = grad_plan(op, source);
  const DType type = op.inputs[1].dtype;
  const RowShape shape = row_shape(size.columns, type);
  const std::uint8_t held = held_rows(shape, size, context);
  const std::size_t sums = block_sum_bytes(shape, size.columns),
                    shared = std::max(sums, plan.has_t(op) ? RowTile::bytes(held, size.columns) : 0);
  auto select = [](auto element, auto packs, auto access, auto codes) {
    return &rms_norm_grad_kernel<decltype(element), packs(), access(), true, typename decltype(codes)::type>;
  };
  auto kernels = load_quantizing<GradArguments>(plan, size.columns, type, context, shared, select);
  auto plain = load_rows<GradArguments>(
      size.columns, type, context.multiprocessors,
      [select](auto element, auto packs, auto access) {
        return select(element, packs, access, std::type_identity<NoQuantizer>{});
      },
      sums);
  load_column_sums();
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    const View& dweight = out[1];
    auto* partials = reinterpret_cast<float*>(static_cast<char*>(exec.workspace) + QuantizePlan::kWorkspace);
    std::int64_t blocks = 0;
    plan.run(in, out, exec, [&](QuantizeArguments quantize) {
      quantize.held = held;
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
      auto pick = [&](const RowKernels<GradArguments>& from) {
        return from.pick({args.dy, args.x, args.weight, args.added, out[0].data, out[2].data, quantize.q});
      };
      blocks =
          std::min(kMostPartials, pick(plain).persistent(ceil_divide(size.rows, rows_at_once(shape.teams, size.rows))));
      pick(kernels).launch(blocks, stream_of(exec), args);
    });
    if (dweight) sum_partial_rows(partials, blocks, size.columns, dweight, accumulate, stream_of(exec));
  };
}

OpSupport query_grad(const OpInstance& op, ScaleSource source) {
  const auto [rows, columns] = matrix_of(op, 1);
  const Extents stream{rows, columns};
  const QuantizePlan plan = grad_plan(op, source);
  OperandCheck check(op, plan.inputs(), plan.outputs(), 1);
  check.input(0, "dy", stream).input(1, "x", stream).input(2, "weight", {columns});
  check.input(3, "rstd", {rows}, DType::f32).input(4, "e", stream);
  check.output(0, "dx", stream).sum(1, "dweight", {columns}).output(2, "sum", stream);
  plan.check(check, op);
  check.that(fits_row(op, 1), kRowTooLong);
  const bool sums = check.ok() && op.outputs[1].present;
  return check.support(QuantizePlan::kWorkspace + (sums ? row_partial_bytes(rows, columns, op.inputs[1].dtype) : 0));
}

}  // namespace

void add_norm_quantize_ops(OpTable& table) {
  add_quantize_kinds(table, "rms_norm", prepare_norm<false>, query_norm<false>);
  add_quantize_kinds(table, "add_rms_norm", prepare_norm<true>, query_norm<true>);
  add_quantize_kinds(table, "rms_norm_grad_add", prepare_grad, query_grad);
}

}  // namespace quern::cuda
