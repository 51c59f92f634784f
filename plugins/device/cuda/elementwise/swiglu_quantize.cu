// SwiGLU and its gradient, quantized and transposed as they are made: the (N, F) and (N, 2 F) bf16 values, the largest
// of a block, go to memory only when somebody reads them.

#include "elementwise/activations.cuh"
#include "quantization/block_quantize.cuh"
#include "quantization/line_quantize.cuh"
#include "quantization/quantize_ops.h"

namespace quern::cuda {

namespace {

/// gate_up (N, 2 F) -> y (N, F)
struct Swiglu {
  static constexpr int kParts = 1;
  static constexpr bool kSums = false;
  static constexpr std::size_t kGateUp = 0;  ///< the input
  const void* gate_up;

  static Swiglu of(std::span<const View> in) { return {in[0].data}; }

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
  static constexpr std::size_t kGateUp = 1;
  const void *dy, *gate_up;

  static SwigluGrad of(std::span<const View> in) { return {in[0].data, in[1].data}; }

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

/// gate_up (N, 2 F)
template <class Producer>
Matrix packed_of(const OpInstance& op) {
  return matrix_of(op, Producer::kGateUp);
}

/// The producer's operands.
template <class Producer>
OperandCheck check_swiglu(const OpInstance& op, std::size_t inputs, std::size_t outputs) {
  constexpr std::size_t kGateUp = Producer::kGateUp;
  const auto [rows, columns] = packed_of<Producer>(op);
  OperandCheck check(op, inputs, outputs, kGateUp);
  check_fused(check, op);
  check.that(extents_of(op, kGateUp).size() == 2 && columns % 2 == 0, "needs an even number of columns in gate_up");
  check.input(kGateUp, "gate_up", {rows, columns});
  if (kGateUp > 0) check.input(0, "dy", {rows, columns / 2});
  check.output(0, "y", {rows, columns / 2 * Producer::kParts});
  return check;
}

// ---- with one scale ----

template <class Producer>
QuantizePlan plan_of(const OpInstance& op, ScaleSource source) {
  const auto [rows, columns] = packed_of<Producer>(op);
  return QuantizePlan(op, source, Producer::kGateUp + 1, 1, {rows, columns / 2 * Producer::kParts});
}

template <class Producer>
Launch prepare(const OpInstance& op, CudaContext& context, ScaleSource source) {
  const auto [rows, columns] = packed_of<Producer>(op);
  const bool whole = columns / 2 % 8 == 0;  // rows of F elements hold whole packs
  return prepare_tiles<Producer>(op, context, plan_of<Producer>(op, source), rows, columns / 2, whole, 0, Producer::of);
}

template <class Producer>
OpSupport query(const OpInstance& op, ScaleSource source) {
  const QuantizePlan plan = plan_of<Producer>(op, source);
  OperandCheck check = check_swiglu<Producer>(op, plan.inputs(), plan.outputs());
  plan.check(check, op);
  return check.support(QuantizePlan::kWorkspace);
}

// ---- with one scale a row and one a column, or for 128 elements of them ----

template <class Producer>
Launch prepare_of_lines(const OpInstance& op, CudaContext& context) {
  const auto [rows, columns] = packed_of<Producer>(op);
  return prepare_lines<Producer>(op, context, rows, columns / 2, 0, Producer::of);
}

template <class Producer>
OpSupport query_lines(const OpInstance& op, const CudaTraits&) {
  const auto [rows, columns] = packed_of<Producer>(op);
  OperandCheck check = check_swiglu<Producer>(op, Producer::kGateUp + 1, 5);
  check_lines(check, op, 1, rows, columns / 2, Producer::kParts);
  return check.support(line_workspace(columns / 2, Producer::kParts));
}

template <class Producer>
Launch prepare_of_blocks(const OpInstance& op, CudaContext& context) {
  const auto [rows, columns] = packed_of<Producer>(op);
  const auto prepare = is_square(op) ? prepare_blocks<Producer, true, decltype(&Producer::of)>
                                     : prepare_blocks<Producer, false, decltype(&Producer::of)>;
  return prepare(op, context, rows, columns / 2, {.y = 0, .codes = 1}, Producer::of);
}

template <class Producer>
OpSupport query_blocks(const OpInstance& op, const CudaTraits&) {
  const auto [rows, columns] = packed_of<Producer>(op);
  OperandCheck check = check_swiglu<Producer>(op, Producer::kGateUp + 1, 5);
  check_blocks(check, op, 1, rows, columns / 2 * Producer::kParts);
  check.that(!is_square(op) || is_spread(op), "is not fused with scales laid out as weights' scales");
  check.that(Producer::kParts == 1 || columns / 2 % kScaleBlock == 0, "needs gates of whole blocks of 128 columns");
  return check.support();
}

template <class Producer>
void add(OpTable& table, const std::string& kind) {
  add_quantize_kinds(table, kind, prepare<Producer>, query<Producer>);
  table[kind + "_quantize_rows_columns"] = {prepare_of_lines<Producer>, query_lines<Producer>};
  for (const char* way : {"_quantize_blocks", "_quantize_squares"})
    table[kind + way] = {prepare_of_blocks<Producer>, query_blocks<Producer>};
}

}  // namespace

void add_swiglu_quantize_ops(OpTable& table) {
  add<Swiglu>(table, "swiglu");
  add<SwigluGrad>(table, "swiglu_grad");
}

}  // namespace quern::cuda
