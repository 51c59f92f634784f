// matmul_swiglu_quantize_delayed and matmul_swiglu_grad_quantize_delayed: products of 8-bit operands that end in the
// codes of SwiGLU, or of its gradient, under a delayed scale. Values are rounded to bf16 as by the parts; only what is
// read goes to memory. Where the assumed scale does not serve, the product is done again (primitives/scale.cuh).

#include "elementwise/activations.cuh"
#include "products/own/product_codes.cuh"
#include "products/own/product_launch.cuh"
#include "quantization/quantize_plan.cuh"

namespace quern::cuda {

using namespace product;

namespace {

struct CodesArguments {
  QuantizeArguments quantize;
  const float *scale_a, *scale_b;
  int rows, width;
  bf16 *gate_up, *values;
};

/// Where a unit's group begins among the warp's rows and the columns of the values.
struct Group {
  int row, column;
  __device__ __forceinline__ Group(DealtPlace place, int unit)
      : row(place.row - static_cast<int>(threadIdx.x) % 32 / 4),
        column(place.column - static_cast<int>(threadIdx.x) % 4 * 8 + kDealtRows * (unit / 2)) {}
};

__device__ __forceinline__ void store(bf16* to, std::int64_t at, const Eight<bf16>& eight) {
  store_eight<Access::vector>(to + at, 0, 1, eight);
}

/// A tile is 128 columns of gate and the same of up.
template <bool kOfTransposed, bool kValues>
struct SwigluEpilogue {
  using Arguments = CodesArguments;
  static constexpr bool kTransposed = kOfTransposed;
  static constexpr DType kFormat = DType::e4m3;
  static constexpr int kColumns = 256, kWidth = 128, kUnits = 2 * kWidth / kDealtRows, kParts = 7;

  __device__ void expect(const Arguments&, DealtPlace) {}

  __device__ __forceinline__ void work(const Arguments& a, DealtPlace place, Codes<kFormat>& codes,
                                       const Eight<bf16> (&units)[2 * kUnits], int part) {
#pragma unroll
    for (int unit = part * kUnits / kParts; unit < (part + 1) * kUnits / kParts; ++unit) {
      const std::int64_t row = place.row + unit % 2 * 8;
      const int column = place.column + kDealtRows * (unit / 2);
      const bool inside = row < a.rows && column < a.width;
      const std::int64_t at = row * a.width + column;
      const Eight<bf16>&gate = units[unit], &up = units[kUnits + unit];
      if (inside && a.gate_up != nullptr) {
        store(a.gate_up, at + row * a.width, gate);
        store(a.gate_up, at + row * a.width + a.width, up);
      }
      float gates[8], ups[8];
      unpack_eight(gate, gates);
      unpack_eight(up, ups);
#pragma unroll
      for (int i = 0; i < 8; ++i) gates[i] = swiglu(gates[i], ups[i]);
      const Eight<bf16> values = round_eight<bf16>(gates);
      if (kValues && inside) store(a.values, at, values);
      const uint2 written = codes.write(a.quantize, values, at, inside);
      if constexpr (kTransposed) {
        if (unit % 2 == 1) {
          const Group group(place, unit);
          codes.write_transposed(a.quantize.t + std::int64_t{group.column} * a.rows + group.row, a.rows, upper_,
                                 written, inside);
        }
        upper_ = written;
      }
    }
  }

 private:
  uint2 upper_;  ///< codes of the unit before
};

/// A tile is 192 columns of dy. gate and up of the next units are read while one is worked on, those of a tile's first
/// before its products end.
template <DType kOf, bool kValues>
struct SwigluGradEpilogue {
  using Arguments = CodesArguments;
  static constexpr bool kTransposed = false;  // the arithmetic alone holds up the products
  static constexpr DType kFormat = kOf;
  static constexpr int kColumns = 192, kWidth = kColumns, kUnits = 2 * kWidth / kDealtRows, kParts = 7, kAhead = 3;

  __device__ __forceinline__ void expect(const Arguments& a, DealtPlace place) {
#pragma unroll
    for (int unit = 0; unit < kAhead; ++unit) read(a, place, unit);
  }

  __device__ __forceinline__ void work(const Arguments& a, DealtPlace place, Codes<kFormat>& codes,
                                       const Eight<bf16> (&units)[kUnits], int part) {
#pragma unroll
    for (int unit = part * kUnits / kParts; unit < (part + 1) * kUnits / kParts; ++unit) {
      float gate[8], up[8], dy[8];
      unpack_eight(gates_[unit % kAhead], gate);
      unpack_eight(ups_[unit % kAhead], up);
      if (unit + kAhead < kUnits) read(a, place, unit + kAhead);
      unpack_eight(units[unit], dy);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const GateUp slope = swiglu_grad(dy[i], gate[i], up[i]);
        gate[i] = slope.gate;
        up[i] = slope.up;
      }
      const auto [at, inside] = where(a, place, unit);
      const Eight<bf16> dgate = round_eight<bf16>(gate), dup = round_eight<bf16>(up);
      if (kValues && inside) {
        store(a.values, at, dgate);
        store(a.values, at + a.width, dup);
      }
      codes.write(a.quantize, dgate, at, inside);
      codes.write(a.quantize, dup, at + a.width, inside);
    }
  }

 private:
  struct Where {
    std::int64_t at;  ///< of the unit's gate, in gate_up and its gradient
    bool inside;
  };
  __device__ static __forceinline__ Where where(const Arguments& a, DealtPlace place, int unit) {
    const int row = place.row + unit % 2 * 8, column = place.column + kDealtRows * (unit / 2);
    return {std::int64_t{2} * row * a.width + column, row < a.rows && column < a.width};
  }
  __device__ __forceinline__ void read(const Arguments& a, DealtPlace place, int unit) {
    const auto [at, inside] = where(a, place, unit);
    gates_[unit % kAhead] = load_eight<Access::vector>(a.gate_up + at, 0, inside ? 1 : 0);
    ups_[unit % kAhead] = load_eight<Access::vector>(a.gate_up + at + a.width, 0, inside ? 1 : 0);
  }

  Eight<bf16> gates_[kAhead] = {}, ups_[kAhead] = {};
};
constexpr int kParts = SwigluEpilogue<false, false>::kParts;
static_assert(kParts == SwigluGradEpilogue<DType::e4m3, false>::kParts);

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
  constexpr std::int64_t kLeast = wgmma::kRowBytes * (kParts - 1);  // a tile's parts of work each go beside a stage
  auto flag = [&op](const char* name) { return op.attributes.integer_or(name, 0) != 0; };
  check.that(gpu.wgmma, "in one kernel needs Hopper's own instructions")
      .that(check.ok() && (op.inputs[0].dtype == DType::e4m3 || (form.gradient && op.inputs[0].dtype == DType::e5m2)),
            "in one kernel takes e4m3, or a gradient in e5m2")
      .that(!flag("transpose_a") && flag("transpose_b"), "in one kernel takes operands along the sums")
      .that(flag("fast_accumulation"), "in one kernel sums in fewer bits than fp32")
      .that(gpu.products != ProductChoice::library, "in one kernel needs own products, which the config excludes")
      .that(rows > 0 && width > 0 && width % kDealtRows == 0 && depth % 16 == 0,
            "in one kernel takes rows, sums over a multiple of 16 and a width that is a multiple of 32")
      .that(depth > kLeast, "in one kernel takes sums over more than " + std::to_string(kLeast) + " terms")
      .that(rows < kMostElements && depth < kMostElements && 2 * width < kMostElements &&
                ceil_divide(rows, kRows) * ceil_divide(width, SwigluEpilogue<false, false>::kWidth) < kMostElements,
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

template <class Epilogue>
using CodesProduct =
    ProductLaunch<StraightSums<OfFloat8<Epilogue::kFormat, DType::e4m3>, Columns::dealt>, InCodes<Epilogue>>;

template <class Epilogue>
Launch prepare(const OpInstance& op, CudaContext& context, Form form) {
  using Product = CodesProduct<Epilogue>;
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
      Product::run({s.rows, s.width, s.depth}, operands, Epilogue::kFormat, in[0].data, arguments, multiprocessors,
                   stream_of(exec));
    });
  };
}

template <bool kValues>
Launch prepare_forward(const OpInstance& op, CudaContext& context) {
  return op.outputs[4].present ? prepare<SwigluEpilogue<true, kValues>>(op, context, {false})
                               : prepare<SwigluEpilogue<false, kValues>>(op, context, {false});
}
template <bool kValues>
Launch prepare_gradient(const OpInstance& op, CudaContext& context) {
  return op.inputs[0].dtype == DType::e5m2 ? prepare<SwigluGradEpilogue<DType::e5m2, kValues>>(op, context, {true})
                                           : prepare<SwigluGradEpilogue<DType::e4m3, kValues>>(op, context, {true});
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
