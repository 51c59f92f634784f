// quantize_blocks: x (N, C) to 8-bit codes by tiles of 128 x 128, row by row and transposed, with scales for the 128
// elements of a row and of a column of the tile, or one for the tile. A tile stays in the registers of its block from
// its amax to its codes, so x is read once.

#include "quantization/quantize_ops.h"
#include "quantization/tile_quantize.cuh"
#include "quern/block_scales.h"

namespace quern::cuda {

namespace {

static_assert(kScaleBlock == kTileSide);

struct BlocksArguments {
  const void* x;           ///< (N, C)
  std::uint8_t *q, *t;     ///< (N, C), (C, N); null: not wanted
  float *scale, *t_scale;  ///< as square_scales, or row_block_scales and column_block_scales, say; null: not wanted
  std::int64_t rows;
  int columns, down, across;  ///< down, across: tiles
  DType format;
};

/// Threads that hold one row are 8 lanes of a warp; those that hold one column are 4 lanes of each warp.
struct TileScales {
  std::uint32_t amax[kTileSide];  ///< of columns, bits; square: of the tile, the first
  float inverse[kTileSide];       ///< of the columns' scales
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

/// Where a block's tile is, in tiles.
struct TilePlace {
  int down, across;
};

/// One scale for the tile, from the amax of each thread's rows; `inverse` is of its rows' scales.
__device__ __forceinline__ void find_square_scale(const BlocksArguments& args, TilePlace place,
                                                  const float (&row_amax)[4], TileScales& shared, float (&inverse)[4]) {
  const float amax = fmaxf(fmaxf(row_amax[0], row_amax[1]), fmaxf(row_amax[2], row_amax[3]));
  const std::uint32_t bits = __reduce_max_sync(~0u, __float_as_uint(amax));
  if (threadIdx.x % 32 == 0) atomicMax(&shared.amax[0], bits);
  __syncthreads();
  const float scale = format_scale(__uint_as_float(shared.amax[0]), args.format);
  if (threadIdx.x == 0) {
    write_square_scale(args.scale, place.down, place.across, args.across, scale);
    write_square_scale(args.t_scale, place.across, place.down, args.down, scale);
  }
#pragma unroll
  for (int r = 0; r < 4; ++r) inverse[r] = __fdiv_rn(1.0f, scale);
}

/// A scale for each row of the tile.
__device__ __forceinline__ void find_row_scales(const BlocksArguments& args, const TileThread& thread, TilePlace place,
                                                const float (&row_amax)[4], float (&inverse)[4]) {
  const std::int64_t first_row = std::int64_t{place.down} * kTileSide + 4 * thread.row_group;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    float amax = row_amax[r];
#pragma unroll
    for (int lanes = 4; lanes > 0; lanes /= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, lanes));
    const float scale = format_scale(amax, args.format);
    inverse[r] = __fdiv_rn(1.0f, scale);
    if (args.scale && thread.lane == 0 && first_row + r < args.rows)
      args.scale[place.across * args.rows + first_row + r] = scale;
  }
}

/// A scale for each column of the tile; their inverses are shared.
__device__ __forceinline__ void find_column_scales(const BlocksArguments& args, const TileThread& thread,
                                                   TilePlace place, const float (&column_amax)[2][8],
                                                   TileScales& shared) {
  const int index = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float amax = column_amax[half][i];
      amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 8));
      amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 16));
      if (index % 32 < 8) atomicMax(&shared.amax[half * 64 + thread.lane * 8 + i], __float_as_uint(amax));
    }
  }
  __syncthreads();
  if (index < kTileSide) {
    const float scale = format_scale(__uint_as_float(shared.amax[index]), args.format);
    shared.inverse[index] = __fdiv_rn(1.0f, scale);
    const int column = place.across * kTileSide + index;
    if (args.t_scale && column < args.columns) args.t_scale[std::int64_t{place.down} * args.columns + column] = scale;
  }
  __syncthreads();
}

/// The largest magnitudes of what a thread holds: of its rows and of its columns.
template <class T>
__device__ __forceinline__ void measure(const Eight<T> (&x)[2][4], float (&row_amax)[4], float (&column_amax)[2][8]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      float values[8];
      unpack_eight(x[half][r], values);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        row_amax[r] = fmaxf(row_amax[r], fabsf(values[i]));
        column_amax[half][i] = fmaxf(column_amax[half][i], fabsf(values[i]));
      }
    }
  }
}

template <class T, Access kAccess, bool kSquare>
__global__ void __launch_bounds__(kTileThreads) quantize_blocks_kernel(const BlocksArguments args) {
  __shared__ ByteTile<3> tile;
  __shared__ TileScales scales;
  const TileThread thread(static_cast<int>(threadIdx.x));
  const TilePlace place{static_cast<int>(blockIdx.x) / args.across, static_cast<int>(blockIdx.x) % args.across};
  const std::int64_t tile_row = std::int64_t{place.down} * kTileSide, first_row = tile_row + 4 * thread.row_group;
  const int tile_column = place.across * kTileSide;
  if (threadIdx.x < kTileSide) scales.amax[threadIdx.x] = 0;
  Eight<T> x[2][4];
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int r = 0; r < 4; ++r)
      x[half][r] =
          load_eight<kAccess>(static_cast<const T*>(args.x) + (first_row + r) * args.columns,
                              tile_column + half * 64 + thread.lane * 8, first_row + r < args.rows ? args.columns : 0);
  __syncthreads();
  float row_amax[4] = {}, column_amax[2][8] = {}, row_inverse[4];
  measure(x, row_amax, column_amax);
  if constexpr (kSquare) {
    find_square_scale(args, place, row_amax, scales, row_inverse);
  } else {
    find_row_scales(args, thread, place, row_amax, row_inverse);
    if (args.t || args.t_scale) find_column_scales(args, thread, place, column_amax, scales);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int local = half * 64 + thread.lane * 8;
    std::uint32_t codes[2][4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      float values[8];
      unpack_eight(x[half][r], values);
      std::uint32_t words[2];
      encode_float8(values, args.format, row_inverse[r], words);
      if (args.q)
        store_codes<kAccess>(args.q + (first_row + r) * args.columns, tile_column + local,
                             first_row + r < args.rows ? args.columns : 0, words);
      if constexpr (!kSquare) {
        if (!args.t) continue;
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] *= scales.inverse[local + i];
        encode_float8(values, args.format, 1.0f, words);
      }
      codes[0][r] = words[0];
      codes[1][r] = words[1];
    }
    if (!args.t) continue;
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      std::uint32_t turned[4];
      turn_bytes(codes[word], turned);
#pragma unroll
      for (int i = 0; i < 4; ++i) tile.put(local + 4 * word + i, thread.row_group, turned[i]);
    }
  }
  if (!args.t) return;
  __syncthreads();
  store_columns<kAccess == Access::vector>(tile, thread, args.t, tile_row, std::int64_t{tile_column}, args.rows,
                                           std::int64_t{args.columns});
}

bool is_square(const OpInstance& op) { return op.attributes.integer_or("square", 0) != 0; }

template <Access kAccess>
LoadedKernel<BlocksArguments> load(const OpInstance& op, CudaContext& context) {
  return with_element(op.inputs[0].dtype, [&](auto element) {
    using T = decltype(element);
    KernelFunction<BlocksArguments> square = quantize_blocks_kernel<T, kAccess, true>,
                                    lines = quantize_blocks_kernel<T, kAccess, false>;
    return load_kernel(is_square(op) ? square : lines, dim3(kTileThreads), context.multiprocessors);
  });
}

Launch prepare(const OpInstance& op, CudaContext& context) {
  const Matrix size = matrix_of(op, 0);
  const bool square = is_square(op), whole = size.columns % 8 == 0 && size.rows % 16 == 0;
  const DType format = *dtype_named(op.attributes.word("format"));
  const auto vector = load<Access::vector>(op, context), scalar = load<Access::scalar>(op, context);
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    const BlocksArguments args{.x = in[0].data,
                               .q = out[0].as<std::uint8_t>(),
                               .t = out[2].as<std::uint8_t>(),
                               .scale = out[1].as<float>(),
                               .t_scale = out[3].as<float>(),
                               .rows = size.rows,
                               .columns = static_cast<int>(size.columns),
                               .down = static_cast<int>(scale_blocks(size.rows)),
                               .across = static_cast<int>(scale_blocks(size.columns)),
                               .format = format};
    if (!square && args.t_scale) {
      const std::int64_t used = args.down * size.columns;
      QUERN_CUDA(cudaMemsetAsync(args.t_scale + used, 0,
                                 static_cast<std::size_t>(out[3].count() - used) * sizeof(float), stream_of(exec)));
    }
    const std::int64_t tiles = std::int64_t{args.down} * args.across;
    if (tiles == 0) return;
    (whole && aligned_16({args.x, args.q, args.t}) ? vector : scalar).launch(tiles, stream_of(exec), args);
  };
}

OpSupport query(const OpInstance& op, const CudaTraits&) {
  const auto [rows, columns] = matrix_of(op, 0);
  OperandCheck check(op, 1, 4);
  const DType format = check_format(check, op);
  check.that(format != DType::i8, "needs a format e4m3 or e5m2");
  check.input(0, "x", extents_of(op, 0)).that(extents_of(op, 0).size() == 2, "needs a matrix x");
  check.output(0, "q", {rows, columns}, format).output(2, "t", {columns, rows}, format);
  check.output(1, "scale", is_square(op) ? square_scales(rows, columns) : row_block_scales(rows, columns), DType::f32);
  check.output(3, "t_scale", is_square(op) ? square_scales(columns, rows) : column_block_scales(rows, columns),
               DType::f32);
  return check.support();
}

}  // namespace

void add_quantize_blocks_op(OpTable& table) { table["quantize_blocks"] = {prepare, query}; }

}  // namespace quern::cuda
