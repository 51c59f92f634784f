// SwiGLU and its gradient, quantized and transposed as they are made: the (N, F) and (N, 2 F) bf16 values, the largest
// of a block, go to memory only when somebody reads them.

#include "elementwise/activations.cuh"
#include "quantization/line_quantize.cuh"
#include "quantization/quantize_ops.h"

namespace quern::cuda {

namespace {

/// gate_up (N, 2 F) -> y (N, F)
struct Swiglu {
  static constexpr int kParts = 1;
  static constexpr bool kSums = false;
  const void* gate_up;

  template <class T>
  struct Loaded {
    Eight<T> gate, up;
  };
  template <Access kAccess, class T>
  __device__ __forceinline__ Loaded<T> load(std::int64_t row, int column, int columns, int width) const {
    const T* gates = static_cast<const T*>(gate_up) + row * 2 * width;
    return {load_eight<kAccess>(gates, column, columns), load_eight<kAccess>(gates + width, column, columns)};
  }
  template <Access kAccess, class T>
  __device__ __forceinline__ void make(const Loaded<T>& loaded, int, Eight<T> (&values)[1]) const {
    float gate[8], up[8];
    unpack_eight(loaded.gate, gate);
    unpack_eight(loaded.up, up);
#pragma unroll
    for (int i = 0; i < 8; ++i) gate[i] = swiglu(gate[i], up[i]);
    values[0] = round_eight<T>(gate);
  }
};

/// dy (N, F), gate_up (N, 2 F) -> dgate_up (N, 2 F)
struct SwigluGrad {
  static constexpr int kParts = 2;
  static constexpr bool kSums = false;
  const void *dy, *gate_up;

  template <class T>
  struct Loaded {
    Eight<T> dy, gate, up;
  };
  template <Access kAccess, class T>
  __device__ __forceinline__ Loaded<T> load(std::int64_t row, int column, int columns, int width) const {
    const T* gates = static_cast<const T*>(gate_up) + row * 2 * width;
    return {load_eight<kAccess>(static_cast<const T*>(dy) + row * width, column, columns),
            load_eight<kAccess>(gates, column, columns), load_eight<kAccess>(gates + width, column, columns)};
  }
  template <Access kAccess, class T>
  __device__ __forceinline__ void make(const Loaded<T>& loaded, int, Eight<T> (&values)[2]) const {
    float dy_of[8], gate[8], up[8];
    unpack_eight(loaded.dy, dy_of);
    unpack_eight(loaded.gate, gate);
    unpack_eight(loaded.up, up);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const GateUp slope = swiglu_grad(dy_of[i], gate[i], up[i]);
      gate[i] = slope.gate;
      up[i] = slope.up;
    }
    values[0] = round_eight<T>(gate);
    values[1] = round_eight<T>(up);
  }
};

/// Rows of F elements hold whole packs of both element types.
bool whole(std::int64_t width) { return width % 8 == 0; }

QuantizePlan forward_plan(const OpInstance& op, ScaleSource source) {
  const Matrix packed = matrix_of(op, 0);
  return QuantizePlan(op, source, 1, 1, {packed.rows, packed.columns / 2});
}
QuantizePlan backward_plan(const OpInstance& op, ScaleSource source) {
  return QuantizePlan(op, source, 2, 1, matrix_of(op, 1));
}

Launch prepare_forward(const OpInstance& op, CudaContext& context, ScaleSource source) {
  const Matrix packed = matrix_of(op, 0);
  return prepare_tiles<Swiglu>(op, context, forward_plan(op, source), packed.rows, packed.columns / 2,
                               whole(packed.columns / 2), 0,
                               [](std::span<const View> in) { return Swiglu{in[0].data}; });
}

Launch prepare_backward(const OpInstance& op, CudaContext& context, ScaleSource source) {
  const Matrix packed = matrix_of(op, 1);
  return prepare_tiles<SwigluGrad>(op, context, backward_plan(op, source), packed.rows, packed.columns / 2,
                                   whole(packed.columns / 2), 0, [](std::span<const View> in) {
                                     return SwigluGrad{in[0].data, in[1].data};
                                   });
}

/// The producer's operands.
OperandCheck check_swiglu(const OpInstance& op, std::size_t inputs, std::size_t outputs, bool backward) {
  const std::size_t gate_up = backward ? 1 : 0;
  const auto [rows, columns] = matrix_of(op, gate_up);
  OperandCheck check(op, inputs, outputs, gate_up);
  check.that(extents_of(op, gate_up).size() == 2 && columns % 2 == 0, "needs an even number of columns in gate_up");
  check.input(gate_up, "gate_up", {rows, columns});
  if (backward) check.input(0, "dy", {rows, columns / 2});
  check.output(0, "y", {rows, backward ? columns : columns / 2});
  return check;
}

OpSupport query(const OpInstance& op, const QuantizePlan& plan, bool backward) {
  OperandCheck check = check_swiglu(op, plan.inputs(), plan.outputs(), backward);
  plan.check(check, op);
  return check.support(QuantizePlan::kWorkspace);
}

// ---- with one scale a row, and one a column ----

Launch prepare_forward_lines(const OpInstance& op, CudaContext& context) {
  const Matrix packed = matrix_of(op, 0);
  return prepare_lines<Swiglu>(op, context, packed.rows, packed.columns / 2, 0,
                               [](std::span<const View> in) { return Swiglu{in[0].data}; });
}

Launch prepare_backward_lines(const OpInstance& op, CudaContext& context) {
  const Matrix packed = matrix_of(op, 1);
  return prepare_lines<SwigluGrad>(op, context, packed.rows, packed.columns / 2, 0, [](std::span<const View> in) {
    return SwigluGrad{in[0].data, in[1].data};
  });
}

OpSupport query_lines(const OpInstance& op, bool backward) {
  const auto [rows, columns] = matrix_of(op, backward ? 1 : 0);
  const int parts = backward ? SwigluGrad::kParts : Swiglu::kParts;
  OperandCheck check = check_swiglu(op, backward ? 2 : 1, 5, backward);
  check_lines(check, op, 1, rows, columns / 2, parts);
  return check.support(line_workspace(columns / 2, parts));
}

}  // namespace

void add_swiglu_quantize_ops(OpTable& table) {
  add_quantize_kinds(table, "swiglu", prepare_forward, [](const OpInstance& op, ScaleSource source) {
    return query(op, forward_plan(op, source), false);
  });
  add_quantize_kinds(table, "swiglu_grad", prepare_backward, [](const OpInstance& op, ScaleSource source) {
    return query(op, backward_plan(op, source), true);
  });
  table["swiglu_quantize_rows_columns"] = {
      prepare_forward_lines, [](const OpInstance& op, const CudaTraits&) { return query_lines(op, false); }};
  table["swiglu_grad_quantize_rows_columns"] = {
      prepare_backward_lines, [](const OpInstance& op, const CudaTraits&) { return query_lines(op, true); }};
}

}  // namespace quern::cuda
