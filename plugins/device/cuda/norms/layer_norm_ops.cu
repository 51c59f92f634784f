// Layer norm over the channels of each token, its gradient, and both fused with the residual add beside them.
// Ba et al., "Layer Normalization" (2016); the variance is a second pass over the row, which is in registers. Every
// output may be an input's memory, since a thread writes only what it alone has read.

#include "norms/norm_ops.h"
#include "primitives/rows.cuh"
#include "shared/operands/op_checks.h"

namespace quern::cuda {

namespace {

struct NormArguments {
  const void *x, *added, *weight, *bias;  ///< (N, C), (N, C), (C), (C)
  void *sum, *y;                          ///< (N, C), null: not wanted
  float *mean, *rstd;                     ///< (N), null: not wanted
  std::int64_t rows;
  int columns;
  float eps;
};

/// to += added, rounded.
template <class T, int kPacks>
__device__ __forceinline__ void add_row(Pack<T> (&to)[kPacks], const Pack<T> (&added)[kPacks]) {
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    Floats<T> sum = unpack(to[p]);
    const Floats<T> b = unpack(added[p]);
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) sum.at[i] += b.at[i];
    to[p] = round_pack(sum);
  }
}

/// y = (x - mean) * rstd * weight + bias. kAdd: of sum = x + added in place of x.
template <class T, int kPacks, Access kAccess, bool kAdd>
__global__ void __launch_bounds__(kRowThreads<kPacks>) layer_norm_kernel(const NormArguments args) {
  __shared__ TeamScratch<> scratch;
  for (std::int64_t base = std::int64_t{blockIdx.x} * blockDim.y; base < args.rows;
       base += std::int64_t{gridDim.x} * blockDim.y) {
    const std::int64_t row = base + threadIdx.y, offset = row * args.columns;
    const int columns = row < args.rows ? args.columns : 0;  // a team without a row reads and writes nothing
    Pack<T> x[kPacks];
    load_row<kAccess>(x, static_cast<const T*>(args.x) + offset, columns);
    if constexpr (kAdd) {
      Pack<T> added[kPacks];
      load_row<kAccess>(added, static_cast<const T*>(args.added) + offset, columns);
      add_row(x, added);
      if (args.sum) store_row<kAccess>(x, static_cast<T*>(args.sum) + offset, columns);
    }
    float total = 0;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Floats<T> values = unpack(x[p]);
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) total += values.at[i];
    }
    const float mean = team_sum(total, scratch) / static_cast<float>(args.columns);
    float squares = 0;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Floats<T> values = unpack(x[p]);
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) {
        const float centred = pack_at<T>(p) + i < columns ? values.at[i] - mean : 0.0f;
        squares = fmaf(centred, centred, squares);
      }
    }
    squares = team_sum(squares, scratch);
    const float rstd = 1.0f / sqrtf(squares / static_cast<float>(args.columns) + args.eps);
    if (threadIdx.x == 0 && columns > 0) {
      if (args.mean) args.mean[row] = mean;
      if (args.rstd) args.rstd[row] = rstd;
    }
    if (!args.y) continue;
    Pack<T> weight[kPacks], bias[kPacks];
    load_row<kAccess>(weight, static_cast<const T*>(args.weight), args.columns);
    load_row<kAccess>(bias, static_cast<const T*>(args.bias), args.columns);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      Floats<T> values = unpack(x[p]);
      const Floats<T> w = unpack(weight[p]), b = unpack(bias[p]);
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) values.at[i] = fmaf((values.at[i] - mean) * rstd, w.at[i], b.at[i]);
      x[p] = round_pack(values);
    }
    store_row<kAccess>(x, static_cast<T*>(args.y) + offset, columns);
  }
}

struct GradArguments {
  const void *dy, *x, *weight, *added;     ///< (N, C), (N, C), (C), (N, C)
  const float *mean, *rstd;                ///< (N)
  void *dx, *sum;                          ///< (N, C), null: not wanted
  float *weight_partials, *bias_partials;  ///< (blocks, C), null: not wanted
  std::int64_t rows;
  int columns;
};

/// What a thread reads of a row; kAdd: with what the result is added to.
template <class T, int kPacks, bool kAdd>
struct GradRow {
  Pack<T> dy[kPacks], x[kPacks], added[kAdd ? kPacks : 1];
  float mean = 0, rstd = 0;

  template <Access kAccess>
  __device__ __forceinline__ void load(const GradArguments& args, std::int64_t row) {
    const std::int64_t offset = row * args.columns;
    const int columns = row < args.rows ? args.columns : 0;  // a team without a row reads and writes nothing
    load_row<kAccess>(dy, static_cast<const T*>(args.dy) + offset, columns);
    load_row<kAccess>(x, static_cast<const T*>(args.x) + offset, columns);
    if constexpr (kAdd) load_row<kAccess>(added, static_cast<const T*>(args.added) + offset, columns);
    mean = columns > 0 ? args.mean[row] : 0.0f;
    rstd = columns > 0 ? args.rstd[row] : 0.0f;
  }
};

/// With n = (x - mean) * rstd and g = dy * weight: dx = rstd * (g - mean(g) - n * mean(g * n)), dweight = sum over
/// tokens of dy * n, dbias the same of dy. kAdd: also sum = dx + added.
template <class T, int kPacks, Access kAccess, bool kAdd>
__global__ void __launch_bounds__(kRowThreads<kPacks>) layer_norm_grad_kernel(const GradArguments args) {
  __shared__ TeamScratch<2> scratch;
  __shared__ float4 shared_sums[kBlockSums<T, kPacks>];
  // The sums of two gradients leave room for one block a multiprocessor, and its registers for reading a row ahead.
  constexpr bool kAhead = kPacks <= 4 && kAccess == Access::vector;
  Floats<T> dweight[kPacks] = {}, dbias[kPacks] = {};
  const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.y;
  GradRow<T, kPacks, kAdd && kAhead> now, next;
  if constexpr (kAhead) next.template load<kAccess>(args, std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y);
  for (std::int64_t base = std::int64_t{blockIdx.x} * blockDim.y; base < args.rows; base += stride) {
    const std::int64_t row = base + threadIdx.y, offset = row * args.columns;
    const int columns = row < args.rows ? args.columns : 0;
    if constexpr (kAhead) {
      now = next;
      next.template load<kAccess>(args, row + stride);
    } else {
      now.template load<kAccess>(args, row);
    }
    Pack<T> weight[kPacks];
    load_row<kAccess>(weight, static_cast<const T*>(args.weight), args.columns);
    float sums[2] = {};  // of g, and of g * n
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Floats<T> d = unpack(now.dy[p]), v = unpack(now.x[p]), w = unpack(weight[p]);
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) {  // beyond the row dy is zero, and so are all terms
        const float g = d.at[i] * w.at[i], n = (v.at[i] - now.mean) * now.rstd;
        sums[0] += g;
        sums[1] = fmaf(g, n, sums[1]);
        dweight[p].at[i] = fmaf(d.at[i], n, dweight[p].at[i]);
        dbias[p].at[i] += d.at[i];
      }
    }
    team_sums(sums, scratch);
    const float mean_g = sums[0] / static_cast<float>(args.columns);
    const float projection = sums[1] / static_cast<float>(args.columns);  // mean(g * n)
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      Floats<T> d = unpack(now.dy[p]);
      const Floats<T> v = unpack(now.x[p]), w = unpack(weight[p]);
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) {
        const float n = (v.at[i] - now.mean) * now.rstd;
        d.at[i] = now.rstd * fmaf(-n, projection, d.at[i] * w.at[i] - mean_g);
      }
      now.dy[p] = round_pack(d);
    }
    Pack<T> added[kAdd && !kAhead ? kPacks : 1];  // read before dx is written, which may be its memory
    if constexpr (kAdd && !kAhead) load_row<kAccess>(added, static_cast<const T*>(args.added) + offset, columns);
    if (args.dx) store_row<kAccess>(now.dy, static_cast<T*>(args.dx) + offset, columns);
    if constexpr (kAdd) {
      if constexpr (kAhead)
        add_row(now.dy, now.added);
      else
        add_row(now.dy, added);
      if (args.sum) store_row<kAccess>(now.dy, static_cast<T*>(args.sum) + offset, columns);
    }
  }
  const std::int64_t partial = std::int64_t{blockIdx.x} * args.columns;
  if (args.weight_partials) store_block_sums(dweight, shared_sums, args.weight_partials + partial, args.columns);
  if (args.bias_partials) store_block_sums(dbias, shared_sums, args.bias_partials + partial, args.columns);
}

// x (N, C), weight, bias (C) -> y (N, C), mean, rstd (N) f32; kAdd: x, added, weight, bias -> sum, y, mean, rstd
template <bool kAdd>
Launch prepare_layer_norm(const OpInstance& op, CudaContext& context) {
  const Matrix size = matrix_of(op, 0);
  const auto eps = static_cast<float>(op.attributes.real("eps"));
  auto kernels = load_rows<NormArguments>(size.columns, op.inputs[0].dtype, context.multiprocessors,
                                          [](auto element, auto packs, auto access) {
                                            return &layer_norm_kernel<decltype(element), packs(), access(), kAdd>;
                                          });
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    if (size.rows == 0) return;
    constexpr std::size_t kFirst = kAdd ? 1 : 0;  // operands after the add's
    NormArguments args{.x = in[0].data,
                       .added = kAdd ? in[1].data : nullptr,
                       .weight = in[kFirst + 1].data,
                       .bias = in[kFirst + 2].data,
                       .sum = kAdd ? out[0].data : nullptr,
                       .y = out[kFirst].data,
                       .mean = static_cast<float*>(out[kFirst + 1].data),
                       .rstd = static_cast<float*>(out[kFirst + 2].data),
                       .rows = size.rows,
                       .columns = static_cast<int>(size.columns),
                       .eps = eps};
    const auto& kernel = kernels.pick({args.x, args.added, args.weight, args.bias, args.sum, args.y});
    kernel.launch(kernel.persistent(ceil_divide(size.rows, kernels.teams)), stream_of(exec), args);
  };
}

// dy, x (N, C), weight (C), mean, rstd (N) f32 -> dx (N, C), dweight, dbias (C); kAdd: also e (N, C) -> dx + e
template <bool kAdd>
Launch prepare_layer_norm_grad(const OpInstance& op, CudaContext& context) {
  const Matrix size = matrix_of(op, 1);
  const bool accumulate_weight = op.outputs[1].accumulate, accumulate_bias = op.outputs[2].accumulate;
  const std::size_t partial_rows = row_partial_bytes(size.rows, size.columns, op.inputs[1].dtype);
  auto load = [&](auto added) {
    return load_rows<GradArguments>(
        size.columns, op.inputs[1].dtype, context.multiprocessors, [](auto element, auto packs, auto access) {
          return &layer_norm_grad_kernel<decltype(element), packs(), access(), decltype(added)::value>;
        });
  };
  auto kernels = load(std::bool_constant<kAdd>{});
  // As many blocks with the add as without, and at any address: sums over tokens have one order.
  const std::int64_t resident = std::min(kernels.resident(), load(std::bool_constant<!kAdd>{}).resident());
  load_column_sums();
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    const View &dweight = out[1], &dbias = out[2];
    auto* partials = static_cast<float*>(exec.workspace);
    GradArguments args{.dy = in[0].data,
                       .x = in[1].data,
                       .weight = in[2].data,
                       .added = kAdd ? in[5].data : nullptr,
                       .mean = static_cast<const float*>(in[3].data),
                       .rstd = static_cast<const float*>(in[4].data),
                       .dx = out[0].data,
                       .sum = kAdd ? out[3].data : nullptr,
                       .weight_partials = dweight ? partials : nullptr,
                       .bias_partials = dbias ? partials + (dweight ? partial_rows / sizeof(float) : 0) : nullptr,
                       .rows = size.rows,
                       .columns = static_cast<int>(size.columns)};
    const auto& kernel = kernels.pick({args.dy, args.x, args.weight, args.added, args.dx, args.sum});
    const std::int64_t work = std::max<std::int64_t>(1, ceil_divide(size.rows, kernels.teams));
    const std::int64_t blocks = std::min({kMostPartials, resident, work});
    kernel.launch(blocks, stream_of(exec), args);
    sum_partial_rows({args.weight_partials, dweight, accumulate_weight}, {args.bias_partials, dbias, accumulate_bias},
                     blocks, size.columns, stream_of(exec));
  };
}

OpSupport query_layer_norm(const OpInstance& op, bool added) {
  OperandCheck check(op, added ? 4 : 3, added ? 4 : 3);
  operands::check_norm(check, op, true, added);
  return check.that(fits_row(op, 0), kRowTooLong).support();
}

OpSupport query_layer_norm_grad(const OpInstance& op, bool added) {
  const auto [rows, columns] = matrix_of(op, 1);
  OperandCheck check(op, added ? 6 : 5, added ? 4 : 3);
  operands::check_norm_grad(check, op, true, added);
  check.that(fits_row(op, 1), kRowTooLong);
  if (!check.ok()) return check.support();
  std::size_t sums = std::size_t{op.outputs[1].present} + std::size_t{op.outputs[2].present};
  return check.support(sums * row_partial_bytes(rows, columns, op.inputs[1].dtype));
}

}  // namespace

void add_layer_norm_ops(OpTable& table) {
  auto query = [](bool added) {
    return [added](const OpInstance& op, const CudaTraits&) { return query_layer_norm(op, added); };
  };
  auto query_grad = [](bool added) {
    return [added](const OpInstance& op, const CudaTraits&) { return query_layer_norm_grad(op, added); };
  };
  table["layer_norm"] = {prepare_layer_norm<false>, query(false)};
  table["add_layer_norm"] = {prepare_layer_norm<true>, query(true)};
  table["layer_norm_grad"] = {prepare_layer_norm_grad<false>, query_grad(false)};
  table["layer_norm_grad_add"] = {prepare_layer_norm_grad<true>, query_grad(true)};
}

}  // namespace quern::cuda
