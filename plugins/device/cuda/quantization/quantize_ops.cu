// quantize, quantize_delayed, quantize_by: x to 8 bits and its transpose, with one scale for the tensor;
// quantize_rows: with one a row; advance_scale: a delayed scale's value for the next step.

#include "quantization/quantize_ops.h"

#include <cmath>
#include <utility>

#include "primitives/rows.cuh"
#include "quantization/line_format.cuh"
#include "quantization/tile_quantize.cuh"

namespace quern::cuda {

namespace {

QuantizePlan plan_of(const OpInstance& op, ScaleSource source) {
  return QuantizePlan(op, source, 1, 0, matrix_of(op, 0));
}

Launch prepare_quantize(const OpInstance& op, CudaContext& context, ScaleSource source) {
  const Matrix size = matrix_of(op, 0);
  Launch codes = prepare_tiles<Copy>(op, context, plan_of(op, source), size.rows, size.columns, true, -1,
                                     [](std::span<const View> in) { return Copy{in[0].data}; });
  return source == ScaleSource::amax ? scale_first(op, context, std::move(codes)) : codes;
}

OpSupport query_quantize(const OpInstance& op, ScaleSource source) {
  QuantizePlan plan = plan_of(op, source);
  OperandCheck check(op, plan.inputs(), plan.outputs());
  check.input(0, "x", extents_of(op, 0)).that(extents_of(op, 0).size() == 2, "needs a matrix x");
  plan.check(check, op);
  return check.support(QuantizePlan::kWorkspace);
}

// ---- quantize_rows ----

constexpr int kLongRowThreads = 512;

struct RowsArguments {
  const void* x;  ///< (N, C)
  std::uint8_t* q;
  float* scale;  ///< (N)
  std::int64_t rows;
  int columns;
  DType format;
  float largest;  ///< of integers
};

/// Raises `amax` to what the values have.
template <int kCount>
__device__ __forceinline__ void measure(const float (&values)[kCount], DType format, float& amax) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) amax = fmaxf(amax, fabsf(values[i]));
  if (loses_nan(values, format)) amax = __uint_as_float(0x7f800000u);
}

/// Quantizes a pack, from `column` of a row on.
template <class T, Access kAccess, bool kStochastic>
__device__ __forceinline__ void write_codes(Floats<T> values, const RowsArguments& args, std::int64_t row,
                                            float inverse, int column, int columns) {
  std::uint32_t words[kPack<T> / 4];
  if constexpr (kStochastic) draw_integers(values.at, inverse, args.largest, column);
  encode_codes(values.at, args.format, kStochastic ? 1.0f : inverse, words);
  store_codes<kAccess>(args.q + row * args.columns, column, columns, words);
}

/// A row in the registers of a team.
template <class T, int kPacks, Access kAccess, bool kStochastic>
__global__ void __launch_bounds__(kRowThreads<kPacks>) quantize_rows_kernel(const RowsArguments args) {
  __shared__ TeamScratch<> scratch;
  for (std::int64_t base = std::int64_t{blockIdx.x} * blockDim.y; base < args.rows;
       base += std::int64_t{gridDim.x} * blockDim.y) {
    const std::int64_t row = base + threadIdx.y;
    const int columns = row < args.rows ? args.columns : 0;
    Pack<T> x[kPacks];
    load_row<kAccess>(x, static_cast<const T*>(args.x) + row * args.columns, columns);
    float amax = 0;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) measure(unpack(x[p]).at, args.format, amax);
    const float scale = line_scale(team_max(amax, scratch), args.format, args.largest);
    if (args.scale && threadIdx.x == 0 && columns > 0) args.scale[row] = scale;
    if (!args.q) continue;
    const float inverse = __fdiv_rn(1.0f, scale);
#pragma unroll
    for (int p = 0; p < kPacks; ++p)
      write_codes<T, kAccess, kStochastic>(unpack(x[p]), args, row, inverse, pack_at<T>(p), columns);
  }
}

/// A row of any length, read once for its amax and once more to quantize it.
template <class T, Access kAccess, bool kStochastic>
__global__ void __launch_bounds__(kLongRowThreads) quantize_long_rows_kernel(const RowsArguments args) {
  __shared__ TeamScratch<> scratch;
  constexpr int kStep = kLongRowThreads * kPack<T>;
  for (std::int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
    const T* x = static_cast<const T*>(args.x) + row * args.columns;
    const int first = static_cast<int>(threadIdx.x) * kPack<T>;
    float amax = 0;
#pragma unroll 4
    for (int column = first; column < args.columns; column += kStep)
      measure(unpack(load_pack<kAccess>(x, column, args.columns)).at, args.format, amax);
    const float scale = line_scale(team_max(amax, scratch), args.format, args.largest);
    if (args.scale && threadIdx.x == 0) args.scale[row] = scale;
    if (!args.q) continue;
    const float inverse = __fdiv_rn(1.0f, scale);
    for (int column = first; column < args.columns; column += kStep)
      write_codes<T, kAccess, kStochastic>(unpack(load_pack<kAccess>(x, column, args.columns)), args, row, inverse,
                                           column, args.columns);
  }
}

template <bool kStochastic>
RowKernels<RowsArguments> load_quantize_rows(const OpInstance& op, int multiprocessors) {
  const DType type = op.inputs[0].dtype;
  const std::int64_t columns = matrix_of(op, 0).columns;
  if (fits_row(op, 0))
    return load_rows<RowsArguments>(columns, type, multiprocessors, [](auto element, auto packs, auto access) {
      return &quantize_rows_kernel<decltype(element), packs(), access(), kStochastic>;
    });
  return with_element(type, [&](auto element) {
    using T = decltype(element);
    KernelFunction<RowsArguments> vector = quantize_long_rows_kernel<T, Access::vector, kStochastic>,
                                  scalar = quantize_long_rows_kernel<T, Access::scalar, kStochastic>;
    return RowKernels<RowsArguments>{load_kernel(vector, dim3(kLongRowThreads), multiprocessors),
                                     load_kernel(scalar, dim3(kLongRowThreads), multiprocessors),
                                     columns % kPack<T> == 0, 1};
  });
}

Launch prepare_rows(const OpInstance& op, CudaContext& context) {
  const Matrix size = matrix_of(op, 0);
  const QuantizedFormat format = line_format(op);
  const auto kernels = rounds_stochastically(op) ? load_quantize_rows<true>(op, context.multiprocessors)
                                                 : load_quantize_rows<false>(op, context.multiprocessors);
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    if (size.rows == 0) return;
    RowsArguments args{.x = in[0].data,
                       .q = out[0].as<std::uint8_t>(),
                       .scale = out[1].as<float>(),
                       .rows = size.rows,
                       .columns = static_cast<int>(size.columns),
                       .format = format.dtype,
                       .largest = format.largest};
    const auto& kernel = kernels.pick({args.x, args.q});
    kernel.launch(kernel.persistent(ceil_divide(size.rows, kernels.teams)), stream_of(exec), args);
  };
}

OpSupport query_rows(const OpInstance& op, const CudaTraits&) {
  auto [rows, columns] = matrix_of(op, 0);
  OperandCheck check(op, 1, 2);
  const DType format = check_line_format(check, op).dtype;
  check.input(0, "x", extents_of(op, 0)).that(extents_of(op, 0).size() == 2, "needs a matrix x");
  check.output(0, "q", {rows, columns}, format).output(1, "scale", {rows}, DType::f32);
  return check.support();
}

// ---- advance_scale ----

struct AdvanceArguments {
  ScaleState* state;  ///< with `history` floats behind it, newest first
  int history;
  float margin;
  DType format;
};

/// One warp. The history moves by one from its far end on, 32 entries at a time.
__global__ void advance_scale_kernel(const AdvanceArguments args) {
  ScaleState& state = *args.state;
  auto* history = reinterpret_cast<float*>(args.state + 1);
  const int lane = static_cast<int>(threadIdx.x);
  const int filled = min(static_cast<int>(state.filled) + 1, args.history);
  float amax = 0;
  for (int base = (filled - 1) / 32 * 32; base >= 0; base -= 32) {
    const int i = base + lane;
    float value = 0;
    if (i < filled) value = i == 0 ? state.amax : history[i - 1];
    __syncwarp();
    if (i < filled) history[i] = value;
    amax = fmaxf(amax, value);
    __syncwarp();
  }
  amax = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(amax)));
  if (lane != 0) return;
  if (amax > 0) state.scale = format_scale(amax, args.format) * args.margin;
  state.amax = state.assumed = 0;
  state.redone = 0;
  state.filled = static_cast<std::uint32_t>(filled);
}

Launch prepare_advance(const OpInstance& op, CudaContext& context) {
  AdvanceArguments args{.state = nullptr,
                        .history = static_cast<int>(op.attributes.integer("history")),
                        .margin = std::ldexp(1.0f, static_cast<int>(op.attributes.integer_or("margin", 0))),
                        .format = *dtype_named(op.attributes.word("format"))};
  auto kernel = load_kernel<AdvanceArguments>(advance_scale_kernel, dim3(32), context.multiprocessors);
  return [=](std::span<const View> in, std::span<const View>, const Exec& exec) {
    AdvanceArguments now = args;
    now.state = static_cast<ScaleState*>(in[0].data);
    kernel.launch(1, stream_of(exec), now);
  };
}

OpSupport query_advance(const OpInstance& op, const CudaTraits&) {
  OperandCheck check(op, 1, 1);
  const std::int64_t history = op.attributes.integer_or("history", 0), margin = op.attributes.integer_or("margin", 0);
  const DType format = check_format(check, op);
  check.that(history >= 1 && history < 1 << 20 && margin >= -64 && margin <= 64,
             "needs a history above 0 and a margin of at most 64");
  check.input(0, "state", {kScaleStateWords + history}, DType::f32);
  return check.support();
}

}  // namespace

void add_quantize_ops(OpTable& table) {
  add_quantize_kinds(table, "", prepare_quantize, query_quantize);
  table["quantize_amax"] = {
      [](const OpInstance& op, CudaContext& context) { return prepare_quantize(op, context, ScaleSource::amax); },
      [](const OpInstance& op, const CudaTraits&) { return query_quantize(op, ScaleSource::amax); }};
  add_amax_op(table);
  table["quantize_rows"] = {prepare_rows, query_rows};
  table["advance_scale"] = {prepare_advance, query_advance};
  add_observe_op(table);
  add_weight_ops(table);
  add_quantize_columns_ops(table);
  add_quantize_blocks_op(table);
  add_swiglu_quantize_ops(table);
  add_norm_quantize_ops(table);
  add_norm_quantize_blocks_ops(table);
  add_rope_quantize_ops(table);
}

std::vector<Fusion> quantize_fusions() {
  const Fusion producers[] = {{"rms_norm_grad_add", "d, dw = rms_norm_grad(dy, x, w, r); y = add(d, e)"},
                              {"add_rms_norm", "s = add(a, b); y, r = rms_norm(s, w)"},
                              {"rms_norm", "y, r = rms_norm(s, w)"},
                              {"swiglu_grad", "y = swiglu_grad(dy, gu)"},
                              {"swiglu", "y = swiglu(gu)"},
                              {"rope_grad_column_sum", "y = rope_grad(dy, p); s = column_sum(y)"},
                              {"rope_grad", "y = rope_grad(dy, p)"}};
  const Fusion lines{"quantize_rows_columns", "q, sr = quantize_rows(y); t, sc = quantize_columns(y)"},
      blocks{"quantize_blocks", "q, sr, t, sc = quantize_blocks(y)"},
      squares{"quantize_squares", "q, sr, t, sc = quantize_squares(y)"};
  std::vector<Fusion> fusions;
  for (const Fusion& producer : producers)
    for (const Fusion& way : {lines, blocks, squares})
      // No kernel quantizes norms and rotations with row scales, or a norm's gradient with block scales.
      if (producer.kind.starts_with("swiglu") || (producer.kind != "rms_norm_grad_add" && way.kind != lines.kind))
        fusions.push_back({producer.kind + "_" + way.kind, producer.pattern + "; " + way.pattern});
  fusions.push_back(lines);
  for (const Fusion& producer : producers)
    for (const auto& way : kQuantizeKinds)
      // With a given scale the result may take its input's place, which a rotation reads beside where it writes.
      if (!producer.kind.starts_with("rope_grad") || way.source != ScaleSource::given)
        fusions.push_back({producer.kind + "_" + way.kind, producer.pattern + "; " + way.pattern});
  return fusions;
}

}  // namespace quern::cuda
