// matmul_swiglu_quantize_delayed and matmul_swiglu_grad_quantize_delayed: 8-bit GEMMs that quantize SwiGLU,
// or its gradient, under a delayed scale. Values are rounded to bf16 as by the parts; only outputs that an op
// reads go to memory. Where the assumed scale does not serve, the GEMM is repeated (primitives/scale.cuh).

#include "products/own/gemm_quantize.cuh"
#include "products/swiglu/swiglu_quantize_form.cuh"
#include "quantization/quantize_plan.cuh"

namespace quern::cuda {

using namespace gemm;

namespace {

constexpr int kParts = 7;

struct QuantizedArguments {
  QuantizeArguments quantize;
  const float *scale_a, *scale_b;
  int rows, width;
  bf16 *gate_up, *values;
  CUtensorMap t;  ///< dealt
};

template <DType kOf, bool kTransposed, bool kValues>
class ToQuantized : public ByUnit {
 public:
  using Arguments = QuantizedArguments;
  static constexpr Rows kRows = kTransposed ? Rows::paired : Rows::k_major;
  static constexpr std::uint32_t kShared = kTransposed ? TransposedValues<2>::kShared : 0;
  static __device__ bool idle(const Arguments& a) { return Quantizer<Formats::float8>(a.quantize).idle(); }
  static __device__ __forceinline__ const bf16* gate_up(const Arguments& a) { return a.gate_up; }

  __device__ ToQuantized(const Arguments& arguments, std::uint32_t shared)
      : a_(arguments), codes_(arguments.quantize), turned_(shared), factor_(*arguments.scale_a * *arguments.scale_b) {}

  __device__ __forceinline__ float scale(float sum) const { return sum * factor_; }

  __device__ __forceinline__ void swiglu(const ValueUnit& unit, const Pack<bf16>& gate, const Pack<bf16>& up,
                                         const Pack<bf16>& y) {
    const std::int64_t at = unit.at(a_.width);
    store(a_.gate_up, unit.at(2 * a_.width), gate, unit);
    store(a_.gate_up, unit.at(2 * a_.width) + a_.width, up, unit);
    if (kValues) store(a_.values, at, y, unit);
    const uint2 codes[1] = {codes_.write(a_.quantize, y, at, unit.inside)};
    transpose(unit, codes);
  }

  __device__ __forceinline__ void gradient(const ValueUnit& unit, const Pack<bf16>&, const Pack<bf16>&,
                                           const Pack<bf16>& dgate, const Pack<bf16>& dup) {
    const std::int64_t at = unit.at(2 * a_.width);
    if (kValues) {
      store(a_.values, at, dgate, unit);
      store(a_.values, at + a_.width, dup, unit);
    }
    const uint2 codes[2] = {codes_.write(a_.quantize, dgate, at, unit.inside),
                            codes_.write(a_.quantize, dup, at + a_.width, unit.inside)};
    transpose(unit, codes);
  }
  __device__ void end() {
    if constexpr (kTransposed) turned_.end();
    codes_.finish(a_.quantize);
  }

 private:
  /// Of gate's columns and up's, or of y's.
  template <int kCount>
  __device__ __forceinline__ void transpose(const ValueUnit& unit, const uint2 (&codes)[kCount]) {
    if constexpr (!kTransposed) return;
    if (unit.number % 2 == 1) {
#pragma unroll
      for (int half = 0; half < kCount; ++half) turned_.put(half, upper_[half], codes[half]);
      turned_.send([&](auto at) {
        if (unit.column >= a_.width || !codes_.writes()) return;
#pragma unroll
        for (int half = 0; half < kCount; ++half)
          tma::store_dealt_box(a_.t, unit.place.first_row(), (unit.column + half * a_.width) / kDealtRows, at(half));
      });
    }
#pragma unroll
    for (int half = 0; half < kCount; ++half) upper_[half] = codes[half];
  }

  const Arguments& a_;
  Codes<kOf> codes_;
  TransposedValues<2> turned_;
  float factor_;
  uint2 upper_[2];  ///< quantized values of the unit before, in gate's columns and up's
};

template <bool kTransposed, bool kValues>
using SwigluQuantized = SwigluEpilogue<ToQuantized<DType::e4m3, kTransposed, kValues>, kParts>;
template <DType kFormat, bool kTransposed, bool kValues>
using SwigluGradQuantized = SwigluGradEpilogue<ToQuantized<kFormat, kTransposed, kValues>, kParts, kGradientStages>;

QuantizePlan plan_of(const OpInstance& op, QuantizedForm form) {
  return {op, ScaleSource::delayed, form.inputs(), 2, form.values(form.sizes(op))};
}

OpSupport query(const OpInstance& op, const CudaTraits& gpu, QuantizedForm form) {
  const QuantizePlan plan = plan_of(op, form);
  OperandCheck check(op, plan.inputs(), plan.outputs(), 2);
  const QuantizedSizes s = form.sizes(op);
  constexpr std::int64_t kLeast = 512;  // a tile has kParts stages or more: of a shorter K many would be of zeros
  check.that(check.ok() && (op.inputs[0].dtype == DType::e4m3 || (form.gradient && op.inputs[0].dtype == DType::e5m2)),
             "in one kernel takes e4m3, or a gradient in e5m2");
  check_quantized_matmul(check, op, gpu, form, {.width = UnitPlace::kColumns, .depth = kLeast});
  check.input(2, "scale_a", {1}, DType::f32).input(3, "scale_b", {1}, DType::f32);
  plan.check(check, op);
  check.that(check.ok() && plan.format() == op.inputs[0].dtype, "in one kernel quantizes to the format of a");
  if (check.ok())
    check.that(!plan.has_t(op) || s.rows % 16 == 0, "in one kernel transposes a multiple of 16 rows")
        .that(plan.has_q(op), "in one kernel writes quantized values");
  return check.support();
}

template <DType kFormat, class EpilogueOp>
using QuantizedMatmul =
    FusedLaunch<StraightMainloop<OfFloat8<kFormat, DType::e4m3>, Columns::dealt, EpilogueOp::kRows>, EpilogueOp>;

template <DType kFormat, class EpilogueOp>
Launch prepare(const OpInstance& op, CudaContext& context, QuantizedForm form) {
  using Product = QuantizedMatmul<kFormat, EpilogueOp>;
  Product::load();
  const QuantizedSizes s = form.sizes(op);
  return [plan = plan_of(op, form), s, form, multiprocessors = context.multiprocessors](
             std::span<const View> in, std::span<const View> out, const Exec& exec) {
    Operands operands{};
    for (int half = 0; half < 2; ++half) {  // gate and up, or the columns of dy
      const std::int64_t first = form.gradient ? 0 : half * s.width;
      operands.b[half] = dealt_tensor_map(DType::e4m3, s.width, s.depth,
                                          in[1].as<const std::uint8_t>() + first * s.depth, EpilogueOp::kColumns / 2);
      operands.b_step[half] = EpilogueOp::kWidth;
      operands.b_first[half] = form.gradient ? half * EpilogueOp::kWidth / 2 : 0;
    }
    QuantizedArguments arguments{.quantize = {},
                                 .scale_a = in[2].as<const float>(),
                                 .scale_b = in[3].as<const float>(),
                                 .rows = static_cast<int>(s.rows),
                                 .width = static_cast<int>(s.width),
                                 .gate_up = (form.gradient ? in[QuantizedForm::kGateUp] : out[0]).as<bf16>(),
                                 .values = out[1].as<bf16>(),
                                 .t = {}};
    plan.run(in, out, exec, [&](const QuantizeArguments& quantize) {
      arguments.quantize = quantize;
      if (quantize.t != nullptr)
        arguments.t = dealt_tensor_map(kFormat, form.values(s).columns, s.rows, quantize.t, kDealtRows, kHalfRows);
      Product::run({s.rows, s.width, s.depth}, operands, kFormat, in[0].data, arguments, multiprocessors,
                   stream_of(exec));
    });
  };
}

template <bool kTransposed, bool kValues>
Launch prepare_form(const OpInstance& op, CudaContext& context, QuantizedForm form) {
  if (!form.gradient) return prepare<DType::e4m3, SwigluQuantized<kTransposed, kValues>>(op, context, form);
  const auto of_gradient = op.inputs[0].dtype == DType::e5m2
                               ? prepare<DType::e5m2, SwigluGradQuantized<DType::e5m2, kTransposed, kValues>>
                               : prepare<DType::e4m3, SwigluGradQuantized<DType::e4m3, kTransposed, kValues>>;
  return of_gradient(op, context, form);
}

Launch prepare_product(const OpInstance& op, CudaContext& context, QuantizedForm form) {
  const bool values = op.outputs[1].present, transposed = plan_of(op, form).has_t(op);
  if (transposed) return (values ? prepare_form<true, true> : prepare_form<true, false>)(op, context, form);
  return (values ? prepare_form<false, true> : prepare_form<false, false>)(op, context, form);
}

}  // namespace

void add_swiglu_quantized_ops(OpTable& table) {
  for (const bool gradient : {false, true}) {
    const QuantizedForm form{gradient};
    table[gradient ? "matmul_swiglu_grad_quantize_delayed" : "matmul_swiglu_quantize_delayed"] = {
        [form](const OpInstance& op, CudaContext& context) { return prepare_product(op, context, form); },
        [form](const OpInstance& op, const CudaTraits& gpu) { return query(op, gpu, form); }};
  }
}

}  // namespace quern::cuda
