#pragma once
// Values that a Producer (tile_quantize.cuh) makes, quantized to 8 bits with one scale a row, and transposed with one
// scale a column. The first pass holds rows in registers: it quantizes them and measures the columns as it goes. The
// second recomputes the values, by tiles, and writes them quantized and transposed.

#include "primitives/rows.cuh"
#include "quantization/line_format.cuh"
#include "quantization/tile_quantize.cuh"

namespace quern::cuda {

template <class Producer>
struct LineArguments {
  Producer producer;
  void* y = nullptr;                           ///< (N, C), the values themselves; null: not wanted
  std::uint8_t *q = nullptr, *t = nullptr;     ///< (N, C), (C, N); null: not wanted
  float *scale = nullptr, *t_scale = nullptr;  ///< (N), (C); null: not wanted
  std::uint32_t* column_amax = nullptr;        ///< (C), bits
  std::int64_t rows = 0;
  int width = 0;  ///< of a part
  DType format = DType::i8;
  float largest = 127;   ///< of integers
  int column_tiles = 0;  ///< of a part
};

// ---- rows ----

constexpr int kLineThreads = 512;  ///< most threads of a block
constexpr int kEights = 5;         ///< of a part of a row that a thread holds
constexpr std::int64_t kLongestLine = std::int64_t{8} * kEights * kLineThreads;

/// Threads that share a row, rows at once.
inline dim3 line_block(std::int64_t width) {
  const std::int64_t team = 32 * std::max<std::int64_t>(1, ceil_divide(width, std::int64_t{32} * 8 * kEights));
  return dim3(static_cast<unsigned>(team), static_cast<unsigned>(std::max<std::int64_t>(1, 256 / team)));
}

/// Raises the columns' amaxes to what the block saw. `shared` holds what each team but the first saw. All threads of
/// the block call it together.
template <class T, int kShared>
__device__ __forceinline__ void raise_columns(Eight<T> (&most)[kEights], Eight<T> (&shared)[kShared],
                                              std::uint32_t* amax, int width, DType format) {
  const int team = static_cast<int>(blockDim.x);
  auto place = [team](int of, int e) { return (of * kEights + e) * team + static_cast<int>(threadIdx.x); };
  __syncthreads();  // no thread reads an earlier call's values
#pragma unroll
  for (int e = 0; e < kEights; ++e)
    if (threadIdx.y > 0) shared[place(static_cast<int>(threadIdx.y) - 1, e)] = most[e];
  __syncthreads();
  if (threadIdx.y > 0) return;
#pragma unroll
  for (int e = 0; e < kEights; ++e) {
    for (int other = 0; other < static_cast<int>(blockDim.y) - 1; ++other)
      take_largest(most[e], shared[place(other, e)], format);
    float largest[8];
    unpack_eight(most[e], largest);
    const int column = (e * team + static_cast<int>(threadIdx.x)) * 8;
    std::uint32_t now[8];  // few blocks raise a column once others have: atomics to one place wait for each other
#pragma unroll
    for (int i = 0; i < 8; ++i) now[i] = column + i < width ? __ldcg(&amax[column + i]) : ~0u;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (__float_as_uint(largest[i]) > now[i]) atomicMax(&amax[column + i], __float_as_uint(largest[i]));
  }
}

template <class Producer, class T, Access kAccess, bool kStochastic>
__global__ void __launch_bounds__(kLineThreads) row_codes_kernel(const LineArguments<Producer> args) {
  constexpr int kParts = Producer::kParts;
  __shared__ TeamScratch<> scratch;
  __shared__ Eight<T> shared[256 * kEights];
  Eight<T> columns_most[kParts][kEights] = {};
  const int width = args.width, team = static_cast<int>(blockDim.x);
  for (std::int64_t base = std::int64_t{blockIdx.x} * blockDim.y; base < args.rows;
       base += std::int64_t{gridDim.x} * blockDim.y) {
    const std::int64_t row = base + threadIdx.y;
    const int columns = row < args.rows ? width : 0;  // a team without a row reads and writes nothing
    auto column_of = [&](int e) { return (e * team + static_cast<int>(threadIdx.x)) * 8; };
    typename Producer::template Loaded<T> loaded[kEights];  // all loads go out before anything is used
#pragma unroll
    for (int e = 0; e < kEights; ++e)
      loaded[e] = args.producer.template load<kAccess, T>(row, column_of(e), columns, width);
    Eight<T> values[kEights][kParts];
    Pack<T> most = {};
#pragma unroll
    for (int e = 0; e < kEights; ++e) {
      args.producer.template make<kAccess, T>(loaded[e], column_of(e), values[e]);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        if (args.column_amax) take_largest(columns_most[part][e], values[e][part], args.format);
#pragma unroll
        for (const Pack<T>& pack : values[e][part].pack) take_largest(most, pack, args.format);
      }
    }
    if (!args.q && !args.scale) continue;
    std::uint32_t amax = 0;
#pragma unroll
    for (const float magnitude : unpack(most).at) amax = max(amax, __float_as_uint(magnitude));
    const float scale =
        line_scale(team_max(__uint_as_float(min(amax, 0x7f800000u)), scratch), args.format, args.largest);
    if (args.scale && threadIdx.x == 0 && columns > 0) args.scale[row] = scale;
    if (!args.q) continue;
    const float inverse = __fdiv_rn(1.0f, scale);
#pragma unroll
    for (int e = 0; e < kEights; ++e) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        float eight[8];
        unpack_eight(values[e][part], eight);
        std::uint32_t words[2];
        if constexpr (kStochastic) draw_integers(eight, inverse, args.largest, part * width + column_of(e));
        encode_codes(eight, args.format, kStochastic ? 1.0f : inverse, words);
        store_codes<kAccess>(args.q + (row * kParts + part) * width, column_of(e), columns, words);
      }
    }
  }
  if (!args.column_amax) return;
#pragma unroll
  for (int part = 0; part < kParts; ++part)
    raise_columns<T>(columns_most[part], shared, args.column_amax + part * width, width, args.format);
}

// ---- columns ----

/// A tile of each part a block, as tile_quantize.cuh has it, from the last one on: what the first pass read last may
/// still be in the cache.
template <class Producer, class T, Access kAccess, bool kStochastic>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks<Producer, T>)
    column_codes_kernel(const LineArguments<Producer> args) {
  constexpr int kParts = Producer::kParts;
  __shared__ ByteTile<3> tiles[kParts];
  __shared__ float inverse[kParts][kTileSide];
  const TileThread thread(static_cast<int>(threadIdx.x));
  const int index = static_cast<int>(gridDim.x - 1 - blockIdx.x), width = args.width;
  const std::int64_t tile_row = std::int64_t{index / args.column_tiles} * kTileSide;
  const int tile_column = index % args.column_tiles * kTileSide;
  const std::int64_t first_row = tile_row + 4 * thread.row_group;
  constexpr bool kAhead = kLoadsAhead<Producer, T>;
  typename Producer::template Loaded<T> loaded[kAhead ? 2 : 1][4];
  auto load_half = [&](int half) {
#pragma unroll
    for (int r = 0; r < 4; ++r)
      loaded[kAhead ? half : 0][r] = args.producer.template load<kAccess, T>(
          first_row + r, tile_column + half * 64 + thread.lane * 8, first_row + r < args.rows ? width : 0, width);
  };
  if constexpr (kAhead) {
    load_half(0);
    load_half(1);
  }
  for (int i = static_cast<int>(threadIdx.x); i < kParts * kTileSide; i += kTileThreads) {
    const int part = i / kTileSide, column = tile_column + i % kTileSide;
    if (column >= width) continue;
    const float scale = line_scale(__uint_as_float(args.column_amax[part * width + column]), args.format, args.largest);
    inverse[part][i % kTileSide] = __fdiv_rn(1.0f, scale);
    if (args.t_scale && tile_row == 0) args.t_scale[part * width + column] = scale;
  }
  __syncthreads();
#pragma unroll(kAhead ? 2 : 1)  // code that fits the instruction cache
  for (int half = 0; half < 2; ++half) {
    const int local = half * 64 + thread.lane * 8, column = tile_column + local;
    if constexpr (!kAhead) load_half(half);
    std::uint32_t codes[kParts][2][4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      Eight<T> made[kParts];
      args.producer.template make<kAccess, T>(loaded[kAhead ? half : 0][r], column, made);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        if (args.y)
          store_eight<kAccess>(static_cast<T*>(args.y) + ((first_row + r) * kParts + part) * width, column,
                               first_row + r < args.rows ? width : 0, made[part]);
        float values[8];
        unpack_eight(made[part], values);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float factor = inverse[part][local + i];
          const auto place = static_cast<std::uint32_t>(first_row + r);
          values[i] =
              kStochastic ? bounded(stochastic_integer(values[i], factor, place), args.largest) : values[i] * factor;
        }
        std::uint32_t words[2];
        encode_codes(values, args.format, 1.0f, words);
        codes[part][0][r] = words[0];
        codes[part][1][r] = words[1];
      }
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int word = 0; word < 2; ++word) {
        std::uint32_t turned[4];
        turn_bytes(codes[part][word], turned);
#pragma unroll
        for (int i = 0; i < 4; ++i) tiles[part].put(local + 4 * word + i, thread.row_group, turned[i]);
      }
    }
  }
  if (!args.t) return;
  __syncthreads();
#pragma unroll
  for (int part = 0; part < kParts; ++part)
    store_columns<kAccess == Access::vector>(tiles[part], thread, args.t + std::int64_t{part} * width * args.rows,
                                             tile_row, std::int64_t{tile_column}, args.rows, std::int64_t{width});
}

// ---- launches ----

template <class Producer>
struct LineKernels {
  LoadedKernel<LineArguments<Producer>> rows, columns;
};

template <class Producer, Access kAccess, bool kStochastic>
LineKernels<Producer> load_lines(DType type, std::int64_t width, int multiprocessors) {
  return with_values_of<Producer>(type, [&](auto element) {
    using T = decltype(element);
    KernelFunction<LineArguments<Producer>> rows = row_codes_kernel<Producer, T, kAccess, kStochastic>,
                                            columns = column_codes_kernel<Producer, T, kAccess, kStochastic>;
    return LineKernels<Producer>{load_kernel(rows, line_block(width), multiprocessors),
                                 load_kernel(columns, dim3(kTileThreads), multiprocessors)};
  });
}
template <class Producer, Access kAccess>
LineKernels<Producer> load_lines(const OpInstance& op, std::int64_t width, int multiprocessors) {
  const DType type = op.inputs[0].dtype;
  return rounds_stochastically(op) ? load_lines<Producer, kAccess, true>(type, width, multiprocessors)
                                   : load_lines<Producer, kAccess, false>(type, width, multiprocessors);
}

/// The outputs of "<producer>_quantize_rows_columns" from `first` on: q, scale, t, t_scale.
inline void check_lines(OperandCheck& check, const OpInstance& op, std::size_t first, std::int64_t rows,
                        std::int64_t width, int parts) {
  const std::int64_t columns = parts * width;
  const DType format = check_line_format(check, op).dtype;
  check.output(first, "q", {rows, columns}, format).output(first + 1, "scale", {rows}, DType::f32);
  check.output(first + 2, "t", {columns, rows}, format).output(first + 3, "t_scale", {columns}, DType::f32);
  check.that(width <= kLongestLine, "on cuda takes rows of up to 20480 elements");
}
inline std::size_t line_workspace(std::int64_t width, int parts) {
  return static_cast<std::size_t>(parts * width) * sizeof(std::uint32_t);
}

/// The launch of such an op: make(inputs) gives the producer, whose rows hold whole packs where `whole` says so; `y` is
/// the output of the values themselves (-1: none), which the quantized ones follow.
template <class Producer, class Make>
Launch prepare_lines(const OpInstance& op, CudaContext& context, std::int64_t rows, std::int64_t width, int y,
                     Make make) {
  const auto vector = load_lines<Producer, Access::vector>(op, width, context.multiprocessors),
             scalar = load_lines<Producer, Access::scalar>(op, width, context.multiprocessors);
  const QuantizedFormat format = line_format(op);
  const bool whole = width % 8 == 0 && rows % 16 == 0;
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    if (rows == 0) return;
    const auto first = static_cast<std::size_t>(y + 1);
    const LineArguments<Producer> args{.producer = make(in),
                                       .y = y < 0 ? nullptr : out[static_cast<std::size_t>(y)].data,
                                       .q = out[first].as<std::uint8_t>(),
                                       .t = out[first + 2].as<std::uint8_t>(),
                                       .scale = out[first + 1].as<float>(),
                                       .t_scale = out[first + 3].as<float>(),
                                       .column_amax = static_cast<std::uint32_t*>(exec.workspace),
                                       .rows = rows,
                                       .width = static_cast<int>(width),
                                       .format = format.dtype,
                                       .largest = format.largest,
                                       .column_tiles = static_cast<int>(ceil_divide(width, kTileSide))};
    bool aligned = whole && aligned_16({args.y, args.q, args.t});
    for (const View& input : in) aligned = aligned && aligned_16({input.data});
    const LineKernels<Producer>& kernels = aligned ? vector : scalar;
    cudaStream_t stream = stream_of(exec);
    QUERN_CUDA(cudaMemsetAsync(args.column_amax, 0, line_workspace(width, Producer::kParts), stream));
    kernels.rows.launch(kernels.rows.persistent(ceil_divide(rows, kernels.rows.block.y)), stream, args);
    if (args.y || args.t || args.t_scale)
      kernels.columns.launch(args.column_tiles * ceil_divide(rows, kTileSide), stream, args);
  };
}

}  // namespace quern::cuda
