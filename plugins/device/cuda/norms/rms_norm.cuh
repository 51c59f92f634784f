#pragma once
// Kernels of RMS norm and its gradient, with the residual add beside them and quantization of their results.
// Zhang & Sennrich, "Root Mean Square Layer Normalization" (2019). Operands are read once and kept in registers; every
// output may be an input's memory, since a thread writes only what it alone has read (not where it quantizes: the
// inputs may be read again).

#include "primitives/rows.cuh"
#include "quantization/quantize_plan.cuh"
#include "quantization/tile_quantize.cuh"

namespace quern::cuda {

struct NormArguments {
  const void *x, *added, *weight;  ///< (N, C), (N, C), (C)
  void *sum, *y;                   ///< (N, C), null: not wanted
  float* rstd;                     ///< (N)
  std::int64_t rows;
  int columns;
  float eps;
  QuantizeArguments quantize = {};  ///< of y; kQuantize only
};

/// Measures a row's packs and quantizes them, as far as the launch wants them.
template <Access kAccess, int kPacks, class T>
__device__ __forceinline__ void quantize_row(Quantizer<Formats::any>& quantizer, const QuantizeArguments& args,
                                             const Pack<T> (&packs)[kPacks], std::int64_t offset, int columns) {
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Floats<T> values = unpack(packs[p]);
    quantizer.measure(args, values.at);
    if (!quantizer.writes()) continue;
    std::uint32_t words[kPack<T> / 4];
    quantizer.encode(args, values.at, words);
    if (args.q) store_codes<kAccess>(args.q + offset, pack_at<T>(p), columns, words);
  }
}

/// Nothing, in kernels that do not quantize.
struct NoQuantizer {
  __device__ __forceinline__ explicit NoQuantizer(const QuantizeArguments&) {}
  __device__ __forceinline__ bool idle() const { return false; }
};
template <bool kQuantize>
using QuantizerIf = std::conditional_t<kQuantize, Quantizer<Formats::any>, NoQuantizer>;

/// y = x * rstd * weight, with rstd = 1 / sqrt(mean(x^2) + eps). kAdd: of sum = x + added in place of x.
template <class T, int kPacks, Access kAccess, bool kAdd, bool kQuantize>
__global__ void __launch_bounds__(kRowThreads<kPacks>) rms_norm_kernel(const NormArguments args) {
  __shared__ TeamScratch<> scratch;
  QuantizerIf<kQuantize> quantizer(args.quantize);
  if (quantizer.idle()) return;
  const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.y;
  auto columns_of = [&args](std::int64_t row) { return row < args.rows ? args.columns : 0; };
  // With one operand there are registers to read the next row ahead.
  constexpr bool kAhead = !kAdd && !kQuantize && kPacks <= 4;
  Pack<T> ahead[kAhead ? kPacks : 1];
  if constexpr (kAhead) {
    const std::int64_t row = std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    load_row<kAccess>(ahead, static_cast<const T*>(args.x) + row * args.columns, columns_of(row));
  }
  for (std::int64_t base = std::int64_t{blockIdx.x} * blockDim.y; base < args.rows; base += stride) {
    const std::int64_t row = base + threadIdx.y, offset = row * args.columns;
    const int columns = columns_of(row);  // a team without a row reads and writes nothing
    Pack<T> x[kPacks];
    if constexpr (kAhead) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) x[p] = ahead[p];
      load_row<kAccess>(ahead, static_cast<const T*>(args.x) + (row + stride) * args.columns, columns_of(row + stride));
    } else {
      load_row<kAccess>(x, static_cast<const T*>(args.x) + offset, columns);
    }
    if constexpr (kAdd) {
      Pack<T> added[kPacks];
      load_row<kAccess>(added, static_cast<const T*>(args.added) + offset, columns);
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        Floats<T> sum = unpack(x[p]);
        const Floats<T> b = unpack(added[p]);
#pragma unroll
        for (int i = 0; i < kPack<T>; ++i) sum.at[i] += b.at[i];
        x[p] = round_pack(sum);
      }
      if (args.sum) store_row<kAccess>(x, static_cast<T*>(args.sum) + offset, columns);
    }
    float squares = 0;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Floats<T> values = unpack(x[p]);
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) squares = fmaf(values.at[i], values.at[i], squares);
    }
    squares = team_sum(squares, scratch);
    const float rstd = 1.0f / sqrtf(squares / static_cast<float>(args.columns) + args.eps);
    if (args.rstd && threadIdx.x == 0 && columns > 0) args.rstd[row] = rstd;
    if (!kQuantize && !args.y) continue;
    Pack<T> weight[kPacks];
    load_row<kAccess>(weight, static_cast<const T*>(args.weight), args.columns);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      Floats<T> values = unpack(x[p]);
      const Floats<T> w = unpack(weight[p]);
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) values.at[i] = values.at[i] * rstd * w.at[i];
      x[p] = round_pack(values);
    }
    if (args.y) store_row<kAccess>(x, static_cast<T*>(args.y) + offset, columns);
    if constexpr (kQuantize) quantize_row<kAccess>(quantizer, args.quantize, x, offset, columns);
  }
  if constexpr (kQuantize) quantizer.finish(args.quantize);
}

struct GradArguments {
  const void *dy, *x, *weight, *added;  ///< (N, C), (N, C), (C), (N, C)
  const float* rstd;                    ///< (N)
  void *dx, *sum;                       ///< (N, C), null: not wanted
  float* partials;                      ///< (blocks, C), sums of dweight; null: not wanted
  std::int64_t rows;
  int columns;
  QuantizeArguments quantize = {};  ///< of sum; kQuantize only
};

/// With n = x * rstd and g = dy * weight: dx = rstd * (g - n * mean(g * n)), dweight = sum over tokens of dy * n.
/// kAdd: also sum = dx + added.
template <class T, int kPacks, Access kAccess, bool kAdd, bool kQuantize>
__global__ void __launch_bounds__(kRowThreads<kPacks>, kPacks == 8 ? 1 : 2)
    rms_norm_grad_kernel(const GradArguments args) {
  __shared__ TeamScratch<> scratch;
  __shared__ float4 shared_sums[kBlockSums<T, kPacks>];
  QuantizerIf<kQuantize> quantizer(args.quantize);
  if (quantizer.idle()) return;
  Floats<T> dweight[kPacks] = {};
  for (std::int64_t base = std::int64_t{blockIdx.x} * blockDim.y; base < args.rows;
       base += std::int64_t{gridDim.x} * blockDim.y) {
    const std::int64_t row = base + threadIdx.y, offset = row * args.columns;
    const int columns = row < args.rows ? args.columns : 0;
    Pack<T> dy[kPacks], x[kPacks], added[kPacks], weight[kPacks];
    load_row<kAccess>(dy, static_cast<const T*>(args.dy) + offset, columns);
    load_row<kAccess>(x, static_cast<const T*>(args.x) + offset, columns);
    if constexpr (kAdd) load_row<kAccess>(added, static_cast<const T*>(args.added) + offset, columns);
    load_row<kAccess>(weight, static_cast<const T*>(args.weight), args.columns);
    const float rstd = columns > 0 ? args.rstd[row] : 0.0f;
    float product = 0;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Floats<T> d = unpack(dy[p]), v = unpack(x[p]), w = unpack(weight[p]);
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) {
        product = fmaf(d.at[i] * w.at[i], v.at[i], product);
        dweight[p].at[i] = fmaf(d.at[i], v.at[i] * rstd, dweight[p].at[i]);
      }
    }
    product = team_sum(product, scratch);
    const float projection = rstd * product / static_cast<float>(args.columns);  // mean(g * n)
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      Floats<T> d = unpack(dy[p]);
      const Floats<T> v = unpack(x[p]), w = unpack(weight[p]);
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) d.at[i] = rstd * fmaf(-(v.at[i] * rstd), projection, d.at[i] * w.at[i]);
      dy[p] = round_pack(d);
    }
    if (args.dx) store_row<kAccess>(dy, static_cast<T*>(args.dx) + offset, columns);
    if constexpr (kAdd) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        Floats<T> sum = unpack(dy[p]);
        const Floats<T> e = unpack(added[p]);
#pragma unroll
        for (int i = 0; i < kPack<T>; ++i) sum.at[i] += e.at[i];
        added[p] = round_pack(sum);
      }
      if (args.sum) store_row<kAccess>(added, static_cast<T*>(args.sum) + offset, columns);
      if constexpr (kQuantize) quantize_row<kAccess>(quantizer, args.quantize, added, offset, columns);
    }
  }
  if constexpr (kQuantize) quantizer.finish(args.quantize);
  if (args.partials)
    store_block_sums(dweight, shared_sums, args.partials + std::int64_t{blockIdx.x} * args.columns, args.columns);
}

}  // namespace quern::cuda
