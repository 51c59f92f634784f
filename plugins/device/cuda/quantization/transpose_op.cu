#include "quantization/transpose.h"

#include "primitives/byte_tile.cuh"
#include "primitives/vector.cuh"
#include "runtime/launch.cuh"

namespace quern::cuda {

namespace {

// ---- bytes ----

struct ByteArguments {
  const std::uint8_t* from;
  std::uint8_t* to;
  std::int64_t rows, columns, column_tiles;
};

/// A tile a block. kWide: rows and columns are multiples of 16, at 16-byte addresses.
template <bool kWide>
__global__ void __launch_bounds__(kTileThreads) transpose_bytes_kernel(const ByteArguments args) {
  __shared__ ByteTile<4> tile;
  const TileThread thread(static_cast<int>(threadIdx.x));
  const std::int64_t tile_row = blockIdx.x / args.column_tiles * kTileSide;
  const std::int64_t tile_column = blockIdx.x % args.column_tiles * kTileSide;
  const int local = thread.lane * 16;
  const std::int64_t column = tile_column + local, first_row = tile_row + 4 * thread.row_group;
  std::uint32_t words[4][4] = {};  // of 4 columns: of a row
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    if (first_row + r >= args.rows || column >= args.columns) continue;
    const std::uint8_t* from = args.from + (first_row + r) * args.columns + column;
    if constexpr (kWide) {
      const uint4 piece = *reinterpret_cast<const uint4*>(from);
      words[0][r] = piece.x, words[1][r] = piece.y, words[2][r] = piece.z, words[3][r] = piece.w;
    } else {
#pragma unroll
      for (int i = 0; i < 16; ++i)
        if (column + i < args.columns) words[i / 4][r] |= std::uint32_t{from[i]} << (8 * (i % 4));
    }
  }
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    std::uint32_t turned[4];
    turn_bytes(words[w], turned);
#pragma unroll
    for (int i = 0; i < 4; ++i) tile.put(local + 4 * w + i, thread.row_group, turned[i]);
  }
  __syncthreads();
  store_columns<kWide>(tile, thread, args.to, tile_row, tile_column, args.rows, args.columns);
}

// ---- wider elements ----

constexpr int kSide = 64;

struct WideArguments {
  const void* from;
  void* to;
  std::int64_t rows, columns, column_tiles;
};

/// (rows, columns) -> (columns, rows), a tile a block of (kSide, 4) threads. Where From is another type than T, it is
/// rounded to it.
template <class T, class From = T>
__global__ void __launch_bounds__(kSide * 4) transpose_kernel(const WideArguments args) {
  __shared__ T tile[kSide][kSide + 4 / sizeof(T) + (sizeof(T) > 4)];
  const auto* x = static_cast<const From*>(args.from);
  auto* y = static_cast<T*>(args.to);
  const std::int64_t row = blockIdx.x / args.column_tiles * kSide, column = blockIdx.x % args.column_tiles * kSide;
  for (int i = threadIdx.y; i < kSide; i += blockDim.y) {
    if (row + i < args.rows && column + threadIdx.x < args.columns)
      tile[i][threadIdx.x] = static_cast<T>(x[(row + i) * args.columns + column + threadIdx.x]);
  }
  __syncthreads();
  for (int i = threadIdx.y; i < kSide; i += blockDim.y) {
    if (column + i < args.columns && row + threadIdx.x < args.rows)
      y[(column + i) * args.rows + row + threadIdx.x] = tile[threadIdx.x][i];
  }
}

template <class T, class From = T>
Launch prepare_wide(std::int64_t rows, std::int64_t columns, CudaContext& context) {
  auto kernel = load_kernel<WideArguments>(transpose_kernel<T, From>, dim3(kSide, 4), context.multiprocessors);
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    const std::int64_t across = ceil_divide(columns, kSide), tiles = ceil_divide(rows, kSide) * across;
    if (tiles > 0) kernel.launch(tiles, stream_of(exec), {in[0].data, out[0].data, rows, columns, across});
  };
}

Launch prepare(const OpInstance& op, CudaContext& context) {
  const std::int64_t rows = op.inputs[0].extents[0], columns = op.inputs[0].extents[1];
  if (op.inputs[0].dtype != op.outputs[0].dtype) return prepare_wide<bf16, float>(rows, columns, context);
  switch (size_of(op.inputs[0].dtype)) {
    case 2: return prepare_wide<std::uint16_t>(rows, columns, context);
    case 4: return prepare_wide<std::uint32_t>(rows, columns, context);
    case 8: return prepare_wide<std::uint64_t>(rows, columns, context);
    default: break;
  }
  load_transpose_bytes();
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    transpose_bytes(in[0].as<std::uint8_t>(), out[0].as<std::uint8_t>(), rows, columns, stream_of(exec));
  };
}

OpSupport query(const OpInstance& op, const CudaTraits&) {
  if (op.inputs.size() != 1 || op.outputs.size() != 1) return {"transpose: takes x, gives y", 0};
  const Operand &x = op.inputs[0], &y = op.outputs[0];
  const bool rounds = x.dtype == DType::f32 && y.dtype == DType::bf16;
  if (x.extents.size() != 2 || y.extents != Extents{x.extents[1], x.extents[0]} || (x.dtype != y.dtype && !rounds))
    return {"transpose: (R, C) gives (C, R) of the same dtype, or bf16 of f32", 0};
  if (y.accumulate) return {"transpose: output 0 cannot accumulate", 0};
  return {};
}

}  // namespace

void load_transpose_bytes() {
  load_kernel<ByteArguments>(transpose_bytes_kernel<true>, dim3(kTileThreads), 1);
  load_kernel<ByteArguments>(transpose_bytes_kernel<false>, dim3(kTileThreads), 1);
}

void transpose_bytes(const std::uint8_t* from, std::uint8_t* to, std::int64_t rows, std::int64_t columns,
                     cudaStream_t stream) {
  const std::int64_t across = ceil_divide(columns, kTileSide), tiles = ceil_divide(rows, kTileSide) * across;
  if (tiles == 0) return;
  const bool wide = rows % 16 == 0 && columns % 16 == 0 && aligned_16({from, to});
  LoadedKernel<ByteArguments> kernel{wide ? transpose_bytes_kernel<true> : transpose_bytes_kernel<false>,
                                     dim3(kTileThreads)};
  kernel.launch(tiles, stream, {from, to, rows, columns, across});
}

void add_transpose_op(OpTable& table) { table["transpose"] = {prepare, query}; }

}  // namespace quern::cuda
