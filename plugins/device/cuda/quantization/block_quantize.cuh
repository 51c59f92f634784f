#pragma once
// Values that a Producer (tile_quantize.cuh) makes, quantized to 8 bits by tiles of 128 x 128, row by row and
// transposed, with scales for the 128 elements of a row and of a column of the tile, or one for the tile. A tile of
// each part stays in the registers of its block from its amax to its quantized values, so its inputs are read once.

#include "quantization/tile_quantize.cuh"
#include "quern/block_scales.h"

namespace quern::cuda {

static_assert(kScaleBlock == kTileSide);

/// Floats that are zero.
struct ZeroedFloats {
  float* at = nullptr;
  std::int64_t count = 0;

  /// Behind the column scales (column_block_scales), of which so many are used; there may be none.
  static ZeroedFloats behind(const View& scales, std::int64_t used) {
    if (!scales) return {};
    return {scales.as<float>() + used, scales.count() - used};
  }
  /// By all threads of block_quantize_kernel.
  __device__ __forceinline__ void clear() const {
    for (std::int64_t i = std::int64_t{blockIdx.x} * kTileThreads + threadIdx.x; i < count;
         i += std::int64_t{gridDim.x} * kTileThreads)
      at[i] = 0;
  }
};

/// A quantized matrix (N, C).
struct BlockCodes {
  std::uint8_t *q, *t;     ///< (N, C), (C, N); null: not wanted
  float *scale, *t_scale;  ///< as square_scales, or row_block_scales and column_block_scales, say; null: not wanted
  ZeroedFloats behind;     ///< column scales
  bool spread;             ///< tile scales are laid out as row or column scales
  std::int64_t rows;
  int columns, down, across;  ///< down, across: tiles
  DType format;
};

template <class Producer>
struct BlockArguments {
  Producer producer;
  BlockCodes codes;
  void* y;          ///< (N, C), the values themselves; null: not wanted
  float* partials;  ///< (sum_tiles(N), C), where the producer sums; null: not wanted
  int width;        ///< of a part: where there are several, whole tiles
};

/// Threads that hold one row are 8 lanes of a warp; those that hold one column are 4 lanes of each warp.
struct TileScales {
  float amax[kTileThreads / 32][kTileSide];  ///< of columns in a warp's rows; square: of the warp, the first
  alignas(16) float inverse[kTileSide];      ///< of the columns' scales
};

/// Where a thread's two packs of a row begin in a tile.
struct PackColumns {
  int at[2];
};

/// Where a tile is in the matrix, in tiles.
struct TilePlace {
  int down, across;
};

/// The scale of block (row, column), and after the last block of a row the ones that pad it.
__device__ __forceinline__ void write_square_scale(float* scales, int row, int column, int columns, float scale) {
  if (!scales) return;
  const int padded = (columns + 3) / 4 * 4;
  float* line = scales + std::int64_t{row} * padded;
  line[column] = scale;
  if (column + 1 == columns)
    for (int i = columns; i < padded; ++i) line[i] = 1.0f;
}

/// The scale of a tile in the place of each of its rows and columns.
__device__ __forceinline__ void write_spread_scale(const BlockCodes& codes, TilePlace place, float scale) {
  const int local = static_cast<int>(threadIdx.x) % kTileSide;
  const std::int64_t row = std::int64_t{place.down} * kTileSide + local;
  const int column = place.across * kTileSide + local;
  if (static_cast<int>(threadIdx.x) >= kTileSide) return;
  if (codes.scale && row < codes.rows) codes.scale[place.across * codes.rows + row] = scale;
  if (codes.t_scale && column < codes.columns) codes.t_scale[std::int64_t{place.down} * codes.columns + column] = scale;
}

/// One scale for the tile, from the amax of each thread's rows; `inverse` is of its rows' scales.
__device__ __forceinline__ void find_square_scale(const BlockCodes& codes, TilePlace place, const float (&row_amax)[4],
                                                  TileScales& shared, float (&inverse)[4]) {
  const float largest = fmaxf(fmaxf(row_amax[0], row_amax[1]), fmaxf(row_amax[2], row_amax[3]));
  const std::uint32_t bits = __reduce_max_sync(~0u, __float_as_uint(largest));
  if (threadIdx.x % 32 == 0) shared.amax[threadIdx.x / 32][0] = __uint_as_float(bits);
  __syncthreads();
  float amax = 0;
  for (const auto& warp : shared.amax) amax = fmaxf(amax, warp[0]);
  const float scale = format_scale(amax, codes.format);
  if (codes.spread) {
    write_spread_scale(codes, place, scale);
  } else if (threadIdx.x == 0) {
    write_square_scale(codes.scale, place.down, place.across, codes.across, scale);
    write_square_scale(codes.t_scale, place.across, place.down, codes.down, scale);
  }
#pragma unroll
  for (int r = 0; r < 4; ++r) inverse[r] = inverse_power(scale);
}

/// A scale for each row of the tile.
__device__ __forceinline__ void find_row_scales(const BlockCodes& codes, const TileThread& thread, TilePlace place,
                                                const float (&row_amax)[4], float (&inverse)[4]) {
  const std::int64_t first_row = std::int64_t{place.down} * kTileSide + 4 * thread.row_group;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    float amax = row_amax[r];
#pragma unroll
    for (int lanes = 4; lanes > 0; lanes /= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, lanes));
    const float scale = format_scale(amax, codes.format);
    inverse[r] = inverse_power(scale);
    if (codes.scale && thread.lane == 0 && first_row + r < codes.rows)
      codes.scale[place.across * codes.rows + first_row + r] = scale;
  }
}

/// The largest magnitudes of what a thread holds of a tile: of its rows and of its columns.
template <class T>
__device__ __forceinline__ void measure(const Eight<T> (&x)[2][4], DType format, float (&rows)[4],
                                        Eight<T> (&columns)[2]) {
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    Pack<T> most = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      take_largest(columns[half], x[half][r], format);
#pragma unroll
      for (const Pack<T>& pack : x[half][r].pack) take_largest(most, pack, format);
    }
    rows[r] = 0;
#pragma unroll
    for (const float magnitude : unpack(most).at) rows[r] = fmaxf(rows[r], magnitude);
  }
}

/// Leaves the largest magnitudes of columns in the rows of the warp.
template <class T>
__device__ __forceinline__ void share_columns(const TileThread& thread, const PackColumns& columns, DType format,
                                              Eight<T> (&most)[2], TileScales& shared) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int lanes = 8; lanes <= 16; lanes *= 2) {
      Eight<T> other;
#pragma unroll
      for (int p = 0; p < 8 / kPack<T>; ++p)
#pragma unroll
        for (int w = 0; w < 4; ++w) other.pack[p].word[w] = __shfl_xor_sync(~0u, most[half].pack[p].word[w], lanes);
      take_largest(most[half], other, format);
    }
    float amax[8];
    unpack_eight(most[half], amax);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (thread.row_group % 4 == 0) shared.amax[thread.row_group / 4][columns.at[half] + i] = amax[i];
  }
}

/// The scale of a column of the tile, from what share_columns left.
__device__ __forceinline__ void find_column_scale(const BlockCodes& codes, TilePlace place, int local,
                                                  TileScales& shared) {
  float amax = 0;
#pragma unroll
  for (const auto& warp : shared.amax) amax = fmaxf(amax, warp[local]);
  const float scale = format_scale(amax, codes.format);
  shared.inverse[local] = inverse_power(scale);
  const int column = place.across * kTileSide + local;
  if (codes.t_scale && column < codes.columns) codes.t_scale[std::int64_t{place.down} * codes.columns + column] = scale;
}

/// Writes q; what t is to be goes to `tile`.
template <Access kAccess, bool kSquare, class T>
__device__ __forceinline__ void encode_tile(const BlockCodes& codes, DType format, const TileThread& thread,
                                            const PackColumns& columns, TilePlace place, const Eight<T> (&x)[2][4],
                                            const float (&row_inverse)[4], const float (&column_inverse)[kTileSide],
                                            ByteTile<3>& tile) {
  const std::int64_t first_row = std::int64_t{place.down} * kTileSide + 4 * thread.row_group;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int local = columns.at[half];
    std::uint32_t row_words[2][4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      float values[8];
      unpack_eight(x[half][r], values);
      std::uint32_t words[2];
      encode_float8(values, format, row_inverse[r], words);
      store_codes<kAccess>(codes.q + (first_row + r) * codes.columns, place.across * kTileSide + local,
                           codes.q && first_row + r < codes.rows ? codes.columns : 0, words);
      if constexpr (!kSquare) {
        if (!codes.t) continue;
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] *= column_inverse[local + i];
        encode_float8(values, format, 1.0f, words);
      }
      row_words[0][r] = words[0];
      row_words[1][r] = words[1];
    }
    if (!codes.t) continue;
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      std::uint32_t turned[4];
      turn_bytes(row_words[word], turned);
#pragma unroll
      for (int i = 0; i < 4; ++i) tile.put(local + 4 * word + i, thread.row_group, turned[i]);
    }
  }
}

/// Blocks that a multiprocessor is to hold: 3, 2 or 1, of threads with 32, 64 or 128 registers of values.
template <class Producer, class T>
inline constexpr int kBlockTiles = std::min<int>(3, 8 / (sizeof(T) * Producer::kParts));

template <class Producer, class T, Access kAccess, bool kSquare>
__global__ void __launch_bounds__(kTileThreads, kBlockTiles<Producer, T>)
    block_quantize_kernel(const BlockArguments<Producer> args) {
  constexpr int kParts = Producer::kParts;
  static_assert((!Producer::kSums || kParts == 1) && kParts * kTileSide <= kTileThreads);
  __shared__ ByteTile<3> tiles[kParts];
  __shared__ ColumnStrands<kTileSide> strands;  // takes no room where it is not used
  __shared__ TileScales scales[kParts];
  const BlockCodes& codes = args.codes;
  __builtin_assume(codes.format != DType::i8);  // as check_blocks made sure
  codes.behind.clear();
  const TileThread thread(static_cast<int>(threadIdx.x));
  const int across = codes.across / kParts;
  const TilePlace first{static_cast<int>(blockIdx.x) / across, static_cast<int>(blockIdx.x) % across};
  auto place_of = [&](int part) { return TilePlace{first.down, part * across + first.across}; };
  const std::int64_t tile_row = std::int64_t{first.down} * kTileSide, first_row = tile_row + 4 * thread.row_group;
  auto columns_of = [&](int r) { return first_row + r < codes.rows ? args.width : 0; };
  constexpr bool kMixes = MixesColumns<Producer>;
  PackColumns locals{thread.lane * 8, 64 + thread.lane * 8};
  if constexpr (kMixes) locals = {args.producer.column_of(thread.lane, 0), args.producer.column_of(thread.lane, 1)};
  auto column_of = [&](int half) { return first.across * kTileSide + locals.at[half]; };
  Eight<T> values[kParts][2][4];
  typename Producer::template Loaded<T> loaded[kMixes ? 2 : 1][4];
  auto load_half = [&](int half) {
#pragma unroll
    for (int r = 0; r < 4; ++r)
      loaded[kMixes ? half : 0][r] =
          args.producer.template load<kAccess, T>(first_row + r, column_of(half), columns_of(r), args.width);
  };
  if constexpr (kMixes) {
    load_half(0);
    load_half(1);
#pragma unroll
    for (int r = 0; r < 4; ++r)
      args.producer.mix(loaded[0][r], loaded[1][r], first_row + r, column_of(0), columns_of(r));
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if constexpr (!kMixes) load_half(half);
    [[maybe_unused]] float sums[8] = {};
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      Eight<T> made[kParts];
      args.producer.template make<kAccess, T>(loaded[kMixes ? half : 0][r], column_of(half), made);
      if constexpr (Producer::kSums) {
        float row[8];
        unpack_eight(made[0], row);
        add_row(sums, row);
      }
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        values[part][half][r] = made[part];
        if (args.y)
          store_eight<kAccess>(static_cast<T*>(args.y) + ((first_row + r) * kParts + part) * args.width,
                               column_of(half), columns_of(r), made[part]);
      }
    }
    if constexpr (Producer::kSums)
      if (args.partials) strands.put(thread, locals.at[half], sums);
  }
  float row_inverse[kParts][4];
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    float row_amax[4];
    Eight<T> columns_most[2] = {};
    measure(values[part], codes.format, row_amax, columns_most);
    if constexpr (kSquare) {
      find_square_scale(codes, place_of(part), row_amax, scales[part], row_inverse[part]);
    } else {
      find_row_scales(codes, thread, place_of(part), row_amax, row_inverse[part]);
      share_columns(thread, locals, codes.format, columns_most, scales[part]);
    }
  }
  if constexpr (!kSquare) {
    __syncthreads();
    const int part = static_cast<int>(threadIdx.x) / kTileSide;
    if (part < kParts)
      find_column_scale(codes, place_of(part), static_cast<int>(threadIdx.x) % kTileSide, scales[part]);
    __syncthreads();
  }
  if constexpr (Producer::kSums) {  // behind the barrier that scales need
    const int local = static_cast<int>(threadIdx.x), column = first.across * kTileSide + local;
    if (args.partials && local < kTileSide && column < args.width)
      args.partials[std::int64_t{first.down} * args.width + column] = strands.total(local);
  }
  auto encode = [&](DType format) {
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      encode_tile<kAccess, kSquare>(codes, format, thread, locals, place_of(part), values[part], row_inverse[part],
                                    scales[part].inverse, tiles[part]);
  };
  codes.format == DType::e4m3 ? encode(DType::e4m3) : encode(DType::e5m2);  // asked once, not for every eight values
  if (!codes.t) return;
  __syncthreads();
#pragma unroll
  for (int part = 0; part < kParts; ++part)
    store_columns<kAccess == Access::vector>(tiles[part], thread, codes.t, tile_row,
                                             std::int64_t{place_of(part).across} * kTileSide, codes.rows,
                                             std::int64_t{codes.columns});
}

/// Of the quantizing part: quantize_squares, or quantize_blocks.
inline bool is_spread(const OpInstance& op) { return op.kind.ends_with("quantize_squares"); }
inline bool is_square(const OpInstance& op) { return is_spread(op) || op.attributes.integer_or("square", 0) != 0; }

/// The outputs of such an op, from `first` on.
inline void check_blocks(OperandCheck& check, const OpInstance& op, std::size_t first, std::int64_t rows,
                         std::int64_t columns) {
  const DType format = check_format(check, op);
  const bool square = is_square(op) && !is_spread(op);
  check.that(format != DType::i8, "needs a format e4m3 or e5m2");
  check.output(first, "q", {rows, columns}, format).output(first + 2, "t", {columns, rows}, format);
  check.output(first + 1, "scale", square ? square_scales(rows, columns) : row_block_scales(rows, columns), DType::f32);
  check.output(first + 3, "t_scale", square ? square_scales(columns, rows) : column_block_scales(rows, columns),
               DType::f32);
}

template <class Producer, bool kSquare, Access kAccess>
LoadedKernel<BlockArguments<Producer>> load_blocks(DType type, int multiprocessors) {
  return with_values_of<Producer>(type, [&](auto element) {
    KernelFunction<BlockArguments<Producer>> kernel =
        block_quantize_kernel<Producer, decltype(element), kAccess, kSquare>;
    return load_kernel(kernel, dim3(kTileThreads), multiprocessors);
  });
}

/// Among an op's outputs the values themselves (-1: none), and the first of the quantized ones.
struct BlockOutputs {
  int y = -1;
  std::size_t codes = 0;
};

/// The launch of such an op: make(inputs) gives the producer, of rows of kParts * width values. One that sums leaves
/// the sums in the output behind y, their partial rows in the workspace.
template <class Producer, bool kSquare = false, class Make>
Launch prepare_blocks(const OpInstance& op, CudaContext& context, std::int64_t rows, std::int64_t width,
                      BlockOutputs outputs, Make make) {
  const auto vector = load_blocks<Producer, kSquare, Access::vector>(op.inputs[0].dtype, context.multiprocessors),
             scalar = load_blocks<Producer, kSquare, Access::scalar>(op.inputs[0].dtype, context.multiprocessors);
  const DType format = *dtype_named(op.attributes.word("format"));
  const bool whole = width % 8 == 0 && rows % 16 == 0, spread = is_spread(op);
  const auto sum = static_cast<std::size_t>(outputs.y + 1);
  const bool sums = Producer::kSums && op.outputs[sum].present, accumulate = sums && op.outputs[sum].accumulate;
  if (sums) load_column_sums();
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    const auto [y, first] = outputs;
    const std::int64_t columns = Producer::kParts * width;
    const BlockCodes codes{
        .q = out[first].as<std::uint8_t>(),
        .t = out[first + 2].as<std::uint8_t>(),
        .scale = out[first + 1].as<float>(),
        .t_scale = out[first + 3].as<float>(),
        .behind = ZeroedFloats::behind(!kSquare || spread ? out[first + 3] : View{}, scale_blocks(rows) * columns),
        .spread = spread,
        .rows = rows,
        .columns = static_cast<int>(columns),
        .down = static_cast<int>(scale_blocks(rows)),
        .across = static_cast<int>(scale_blocks(columns)),
        .format = format};
    const BlockArguments<Producer> args{.producer = make(in),
                                        .codes = codes,
                                        .y = y < 0 ? nullptr : out[static_cast<std::size_t>(y)].data,
                                        .partials = sums ? static_cast<float*>(exec.workspace) : nullptr,
                                        .width = static_cast<int>(width)};
    const std::int64_t tiles = std::int64_t{codes.down} * codes.across / Producer::kParts;
    bool aligned = whole && aligned_16({args.y, codes.q, codes.t});
    for (const View& input : in) aligned = aligned && aligned_16({input.data});
    if (tiles > 0)
      (aligned ? vector : scalar).launch(tiles, stream_of(exec), args);
    else if (codes.behind.count > 0)
      QUERN_CUDA(cudaMemsetAsync(codes.behind.at, 0, static_cast<std::size_t>(codes.behind.count) * sizeof(float),
                                 stream_of(exec)));
    if (sums) sum_partial_rows(args.partials, sum_tiles(rows), width, out[sum], accumulate, stream_of(exec));
  };
}

}  // namespace quern::cuda
