// matmul_swiglu_quantize_delayed and matmul_swiglu_grad_quantize_delayed: products of 8-bit operands that end in the
// codes of SwiGLU, or of its gradient, under a delayed scale. Values are rounded to bf16 as by the parts; only what is
// read goes to memory. Where the assumed scale does not serve, the product is done again (primitives/scale.cuh).

#include "products/own/product_codes.cuh"
#include "products/swiglu/swiglu_epilogues.cuh"
#include "quantization/quantize_plan.cuh"

namespace quern::cuda {

using namespace product;

namespace {

constexpr int kParts = 7;

struct CodesArguments {
  QuantizeArguments quantize;
  const float *scale_a, *scale_b;
  int rows, width;
  bf16 *gate_up, *values;
};

template <DType kOf, bool kTransposed, bool kValues>
class ToCodes {
 public:
  using Arguments = CodesArguments;
  static constexpr std::uint32_t kShared = kTransposed ? Codes<kOf>::kShared : 0;
  static __device__ bool idle(const Arguments& a) { return Quantizer<Formats::float8>(a.quantize).idle(); }
  static __device__ __forceinline__ const bf16* gate_up(const Arguments& a) { return a.gate_up; }

  __device__ ToCodes(const Arguments& arguments, std::uint32_t shared)
      : a_(arguments), codes_(arguments.quantize, shared), factor_(*arguments.scale_a * *arguments.scale_b) {}

  __device__ __forceinline__ float scale(float sum) const { return sum * factor_; }

  __device__ __forceinline__ void swiglu(const ValueUnit& unit, const Pack<bf16>& gate, const Pack<bf16>& up,
                                         const Pack<bf16>& y) {
    const std::int64_t at = unit.at(a_.width);
    if (unit.inside && a_.gate_up != nullptr) {
      const std::int64_t of_gate = unit.at(2 * a_.width);
      store_unit(a_.gate_up, of_gate, gate);
      store_unit(a_.gate_up, of_gate + a_.width, up);
    }
    if (kValues && unit.inside) store_unit(a_.values, at, y);
    const uint2 written = codes_.write(a_.quantize, y, at, unit.inside);
    if constexpr (kTransposed) {
      if (unit.number % 2 == 1) {
        const int lane = static_cast<int>(threadIdx.x) % 32, row = unit.place.row - lane / 4;
        const std::int64_t column = unit.column - lane % 4 * 8;
        codes_.write_transposed(a_.quantize.t + column * a_.rows + row, a_.rows, upper_, written, unit.inside);
      }
      upper_ = written;
    }
  }

  __device__ __forceinline__ void gradient(const ValueUnit& unit, const Pack<bf16>&, const Pack<bf16>&,
                                           const Pack<bf16>& dgate, const Pack<bf16>& dup) {
    const std::int64_t at = unit.at(2 * a_.width);
    if (kValues && unit.inside) {
      store_unit(a_.values, at, dgate);
      store_unit(a_.values, at + a_.width, dup);
    }
    codes_.write(a_.quantize, dgate, at, unit.inside);
    codes_.write(a_.quantize, dup, at + a_.width, unit.inside);
  }
  __device__ void end() { codes_.finish(a_.quantize); }

 private:
  const Arguments& a_;
  Codes<kOf> codes_;
  float factor_;
  uint2 upper_;  ///< codes of the unit before
};

template <bool kTransposed, bool kValues>
using SwigluCodes = SwigluEpilogue<ToCodes<DType::e4m3, kTransposed, kValues>, kParts>;
/// Without transposed codes: the arithmetic alone holds up the products.
template <DType kFormat, bool kValues>
using SwigluGradCodes = SwigluGradEpilogue<ToCodes<kFormat, false, kValues>, kParts>;

/// Inputs by pattern: a, b, their scales, for the gradient gate_up, the state. Outputs: the product, the values, codes.
struct Form {
  bool gradient;
  static constexpr std::size_t kGateUp = 4;
  std::size_t state() const { return gradient ? 5 : 4; }
};

struct Sizes {
  std::int64_t rows, width, depth;  ///< width: of the gate
};
Sizes sizes_of(const OpInstance& op, Form form) {
  const Matrix a = matrix_of(op, 0), b = matrix_of(op, 1);
  return {a.rows, form.gradient ? b.rows : b.rows / 2, a.columns};
}

QuantizePlan plan_of(const OpInstance& op, Form form) {
  const Sizes s = sizes_of(op, form);
  return {op, ScaleSource::delayed, form.state(), 2, {s.rows, form.gradient ? 2 * s.width : s.width}};
}

OpSupport query(const OpInstance& op, const CudaTraits& gpu, Form form) {
  const QuantizePlan plan = plan_of(op, form);
  OperandCheck check(op, plan.inputs(), plan.outputs(), 2);
  const auto [rows, width, depth] = sizes_of(op, form);
  constexpr std::int64_t kLeast = 512;  // a tile has kParts stages: of shorter sums many would be of zeros
  auto flag = [&op](const char* name) { return op.attributes.integer_or(name, 0) != 0; };
  check.that(gpu.wgmma, "in one kernel needs Hopper's own instructions")
      .that(check.ok() && (op.inputs[0].dtype == DType::e4m3 || (form.gradient && op.inputs[0].dtype == DType::e5m2)),
            "in one kernel takes e4m3, or a gradient in e5m2")
      .that(!flag("transpose_a") && flag("transpose_b"), "in one kernel takes operands along the sums")
      .that(flag("fast_accumulation"), "in one kernel sums in fewer bits than fp32")
      .that(gpu.products != ProductChoice::library, "in one kernel needs own products, which the config excludes")
      .that(rows > 0 && width > 0 && width % UnitPlace::kColumns == 0 && depth % 16 == 0,
            "in one kernel takes rows, sums over a multiple of 16 and a width that is a multiple of 32")
      .that(depth >= kLeast, "in one kernel takes sums over " + std::to_string(kLeast) + " terms or more")
      .that(rows < kMostElements && depth < kMostElements && 2 * width < kMostElements &&
                ceil_divide(rows, kRows) * ceil_divide(width, SwigluCodes<false, false>::kWidth) < kMostElements,
            "in one kernel takes sizes below 2^30");
  check.input(0, "a", {rows, depth}, check.ok() ? op.inputs[0].dtype : DType::e4m3)
      .input(1, "b", {form.gradient ? width : 2 * width, depth}, DType::e4m3)
      .input(2, "scale_a", {1}, DType::f32)
      .input(3, "scale_b", {1}, DType::f32);
  if (form.gradient) check.input(Form::kGateUp, "gate_up", {rows, 2 * width}, DType::bf16);
  plan.check(check, op);
  check.that(check.ok() && plan.format() == op.inputs[0].dtype, "in one kernel gives codes in the format of a");
  check.output(0, "y", {rows, form.gradient ? width : 2 * width}, DType::bf16)
      .output(1, "values", {rows, form.gradient ? 2 * width : width}, DType::bf16);
  if (check.ok())
    check
        .that(!plan.has_t(op) || (!form.gradient && rows % 16 == 0),
              "in one kernel writes transposed codes of no gradient, and of a multiple of 16 rows")
        .that(plan.has_q(op), "in one kernel writes codes")
        .that(!form.gradient || !op.outputs[0].present, "in one kernel does not write dy");
  return check.support();
}

template <DType kFormat, class Epilogue>
using CodesProduct = EpilogueLaunch<StraightSums<OfFloat8<kFormat, DType::e4m3>, Columns::dealt>, Epilogue>;

template <DType kFormat, class Epilogue>
Launch prepare(const OpInstance& op, CudaContext& context, Form form) {
  using Product = CodesProduct<kFormat, Epilogue>;
  Product::load();
  const Sizes s = sizes_of(op, form);
  return [plan = plan_of(op, form), s, form, multiprocessors = context.multiprocessors](
             std::span<const View> in, std::span<const View> out, const Exec& exec) {
    Operands operands{};
    for (int half = 0; half < 2; ++half) {  // gate and up, or the columns of dy
      const std::int64_t first = form.gradient ? 0 : half * s.width;
      operands.b[half] = dealt_tensor_map(DType::e4m3, s.width, s.depth,
                                          in[1].as<const std::uint8_t>() + first * s.depth, Epilogue::kColumns / 2);
      operands.b_step[half] = Epilogue::kWidth;
      operands.b_first[half] = form.gradient ? half * Epilogue::kWidth / 2 : 0;
    }
    CodesArguments arguments{.quantize = {},
                             .scale_a = in[2].as<const float>(),
                             .scale_b = in[3].as<const float>(),
                             .rows = static_cast<int>(s.rows),
                             .width = static_cast<int>(s.width),
                             .gate_up = (form.gradient ? in[Form::kGateUp] : out[0]).as<bf16>(),
                             .values = out[1].as<bf16>()};
    plan.run(in, out, exec, [&](const QuantizeArguments& quantize) {
      arguments.quantize = quantize;
      Product::run({s.rows, s.width, s.depth}, operands, kFormat, in[0].data, arguments, multiprocessors,
                   stream_of(exec));
    });
  };
}

template <bool kValues>
Launch prepare_forward(const OpInstance& op, CudaContext& context) {
  const auto with = op.outputs[4].present ? prepare<DType::e4m3, SwigluCodes<true, kValues>>
                                          : prepare<DType::e4m3, SwigluCodes<false, kValues>>;
  return with(op, context, {false});
}
template <bool kValues>
Launch prepare_gradient(const OpInstance& op, CudaContext& context) {
  const auto with = op.inputs[0].dtype == DType::e5m2 ? prepare<DType::e5m2, SwigluGradCodes<DType::e5m2, kValues>>
                                                      : prepare<DType::e4m3, SwigluGradCodes<DType::e4m3, kValues>>;
  return with(op, context, {true});
}

}  // namespace

void add_swiglu_codes_ops(OpTable& table) {
  auto add = [&table](const char* kind, Form form, auto with_values, auto without) {
    table[kind] = {[=](const OpInstance& op, CudaContext& context) {
                     return op.outputs[1].present ? with_values(op, context) : without(op, context);
                   },
                   [=](const OpInstance& op, const CudaTraits& gpu) { return query(op, gpu, form); }};
  };
  add("matmul_swiglu_quantize_delayed", {false}, prepare_forward<true>, prepare_forward<false>);
  add("matmul_swiglu_grad_quantize_delayed", {true}, prepare_gradient<true>, prepare_gradient<false>);
}

}  // namespace quern::cuda
