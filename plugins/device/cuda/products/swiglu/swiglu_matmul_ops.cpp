// matmul_swiglu, matmul_swiglu_grad, matmul_swiglu_and_grad: GEMMs and SwiGLU in one, where Hopper's tensor cores
// can do it. Elsewhere they are refused, and the program keeps their parts.

#include "products/swiglu/swiglu_matmul.h"
#include "runtime/kernels.h"
#include "runtime/operand_check.h"

namespace quern::cuda {

namespace {

/// The outputs' places; -1: not there.
struct GradOutputs {
  int dy, y, dgate_up;
  int count() const { return dgate_up + 1; }
};
constexpr GradOutputs kGrad{0, -1, 1}, kAndGrad{0, 1, 2};

bool transposed(const OpInstance& op, const char* operand) { return op.attributes.integer_or(operand, 0) != 0; }

/// `halves`: the GEMM's columns in units of the width.
SwigluMatmulShape shape_of(const OpInstance& op, std::int64_t halves) {
  const Matrix a = matrix_of(op, 0), b = matrix_of(op, 1);
  const bool across = transposed(op, "transpose_b");
  return {.rows = a.rows, .width = (across ? b.rows : b.columns) / halves, .depth = a.columns, .transposed = across};
}

Extents stored(const SwigluMatmulShape& s, std::int64_t columns) {
  return s.transposed ? Extents{columns, s.depth} : Extents{s.depth, columns};
}

void check_product(OperandCheck& check, const OpInstance& op, const SwigluMatmulShape& s, const CudaTraits& gpu) {
  check.that(gpu.wgmma, "in one kernel needs Hopper's own instructions")
      .that(gpu.products != ProductChoice::library, "in one kernel needs own GEMMs, which the config excludes")
      .that(check.ok() && op.inputs[0].dtype == DType::bf16, "in one kernel takes bf16")
      .that(!transposed(op, "transpose_a"), "in one kernel takes no transposed a")
      .that(wgmma_takes(s), "in one kernel takes sizes that are multiples of 8 and below 2^30");
}

OpSupport query_forward(const OpInstance& op, const CudaTraits& gpu) {
  OperandCheck check(op, 2, 2);
  const SwigluMatmulShape s = shape_of(op, 2);
  check_product(check, op, s, gpu);
  return check.that(s.transposed, "in one kernel takes a K-major weight")
      .input(0, "a", {s.rows, s.depth})
      .input(1, "b", stored(s, 2 * s.width))
      .output(0, "gate_up", {s.rows, 2 * s.width})
      .output(1, "y", {s.rows, s.width})
      .support();
}

OpSupport query_gradient(const OpInstance& op, const CudaTraits& gpu, const GradOutputs& outputs) {
  OperandCheck check(op, 3, static_cast<std::size_t>(outputs.count()));
  const SwigluMatmulShape s = shape_of(op, 1);
  check_product(check, op, s, gpu);
  check.input(0, "a", {s.rows, s.depth})
      .input(1, "b", stored(s, s.width))
      .input(2, "gate_up", {s.rows, 2 * s.width})
      .output(0, "dy", {s.rows, s.width})
      .output(static_cast<std::size_t>(outputs.dgate_up), "dgate_up", {s.rows, 2 * s.width});
  if (outputs.y >= 0) check.output(static_cast<std::size_t>(outputs.y), "y", {s.rows, s.width});
  return check.support();
}

Launch prepare_forward(const OpInstance& op, CudaContext& context) {
  load_swiglu_matmuls();
  return [s = shape_of(op, 2), multiprocessors = context.multiprocessors](std::span<const View> in,
                                                                          std::span<const View> out, const Exec& exec) {
    swiglu_matmul(s, {.x = in[0].data, .weight = in[1].data, .gate_up = out[0].data, .y = out[1].data}, multiprocessors,
                  stream_of(exec));
  };
}

Launch prepare_gradient(const OpInstance& op, CudaContext& context, const GradOutputs& outputs) {
  load_swiglu_matmuls();
  return [s = shape_of(op, 1), outputs, multiprocessors = context.multiprocessors](
             std::span<const View> in, std::span<const View> out, const Exec& exec) {
    auto data = [out](int i) { return i < 0 ? nullptr : out[static_cast<std::size_t>(i)].data; };
    swiglu_grad_matmul(s,
                       {.dout = in[0].data,
                        .weight = in[1].data,
                        .gate_up = in[2].data,
                        .dy = data(outputs.dy),
                        .y = data(outputs.y),
                        .dgate_up = data(outputs.dgate_up)},
                       multiprocessors, stream_of(exec));
  };
}

}  // namespace

void add_swiglu_matmul_ops(OpTable& table) {
  table["matmul_swiglu"] = {prepare_forward, query_forward};
  auto add = [&table](const char* kind, GradOutputs outputs) {
    table[kind] = {
        [outputs](const OpInstance& op, CudaContext& context) { return prepare_gradient(op, context, outputs); },
        [outputs](const OpInstance& op, const CudaTraits& gpu) { return query_gradient(op, gpu, outputs); }};
  };
  add("matmul_swiglu_grad", kGrad);
  add("matmul_swiglu_and_grad", kAndGrad);
  add_swiglu_quantized_ops(table);
  add_swiglu_tile_scales_ops(table);
  add_swiglu_row_scales_ops(table);
}

}  // namespace quern::cuda
