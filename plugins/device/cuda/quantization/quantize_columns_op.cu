// quantize_columns: x (N, C) to t (C, N), 8-bit codes with one scale a column of x, so that the products that sum over
// tokens can have one a row. A pass for the columns' amax, a pass that writes.

#include "quantization/quantize_ops.h"
#include "quantization/tile_quantize.cuh"

namespace quern::cuda {

namespace {

constexpr int kLanes = 32, kStrands = 8;  // of a block of the first pass: packs of its columns; rows at once
constexpr std::int64_t kBlocks = 2048;    // about as many, to fill any GPU

struct ColumnsArguments {
  const void* x;               ///< (N, C)
  std::uint8_t* t;             ///< (C, N), null: not wanted
  float* scale;                ///< (C), null: not wanted
  std::uint32_t* amax;         ///< (C), bits
  std::int64_t rows, stretch;  ///< stretch: rows of a block of the first pass
  int columns, tiles;          ///< tiles: across, of the pass
  DType format;
};

template <class T, Access kAccess>
__global__ void __launch_bounds__(kLanes* kStrands) column_amax_kernel(const ColumnsArguments args) {
  __shared__ float strands[kStrands][kLanes * kPack<T>];
  const int lane_column = static_cast<int>(threadIdx.x) * kPack<T>;
  const int tile_column = static_cast<int>(blockIdx.x) % args.tiles * kLanes * kPack<T>;
  const std::int64_t begin = static_cast<int>(blockIdx.x) / args.tiles * args.stretch;
  const std::int64_t end = begin + args.stretch < args.rows ? begin + args.stretch : args.rows;
  Floats<T> amax = {};
#pragma unroll 4
  for (std::int64_t row = begin + threadIdx.y; row < end; row += kStrands) {
    const T* x = static_cast<const T*>(args.x) + row * args.columns;
    const Floats<T> values = unpack(load_pack<kAccess>(x, tile_column + lane_column, args.columns));
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) {
      amax.at[i] = fmaxf(amax.at[i], fabsf(values.at[i]));
      if (args.format == DType::i8 && isnan(values.at[i])) amax.at[i] = __uint_as_float(0x7f800000u);
    }
  }
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) strands[threadIdx.y][lane_column + i] = amax.at[i];
  __syncthreads();
  for (int column = static_cast<int>(threadIdx.y) * kLanes + static_cast<int>(threadIdx.x); column < kLanes * kPack<T>;
       column += kLanes * kStrands) {
    float largest = 0;
    for (int strand = 0; strand < kStrands; ++strand) largest = fmaxf(largest, strands[strand][column]);
    if (tile_column + column < args.columns && largest > 0)
      atomicMax(&args.amax[tile_column + column], __float_as_uint(largest));
  }
}

/// A tile a block, as tile_quantize.cuh has it.
template <class T, Access kAccess>
__global__ void __launch_bounds__(kTileThreads) column_codes_kernel(const ColumnsArguments args) {
  __shared__ ByteTile<3> tile;
  const TileThread thread(static_cast<int>(threadIdx.x));
  const std::int64_t tile_row = std::int64_t{static_cast<int>(blockIdx.x) / args.tiles} * kTileSide;
  const int tile_column = static_cast<int>(blockIdx.x) % args.tiles * kTileSide;
  const std::int64_t first_row = tile_row + 4 * thread.row_group;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int local = half * 64 + thread.lane * 8, column = tile_column + local;
    Eight<T> x[4];
#pragma unroll
    for (int r = 0; r < 4; ++r)
      x[r] = load_eight<kAccess>(static_cast<const T*>(args.x) + (first_row + r) * args.columns, column,
                                 first_row + r < args.rows ? args.columns : 0);
    float scale[8], inverse[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      scale[i] = column + i < args.columns ? format_scale(__uint_as_float(args.amax[column + i]), args.format) : 1.0f;
      inverse[i] = __fdiv_rn(1.0f, scale[i]);
      if (args.scale && first_row == 0 && column + i < args.columns) args.scale[column + i] = scale[i];
    }
    std::uint32_t codes[2][4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      float values[8];
      unpack_eight(x[r], values);
#pragma unroll
      for (int i = 0; i < 8; ++i)
        values[i] = args.format == DType::i8 ? __fdiv_rn(values[i], scale[i]) : values[i] * inverse[i];
      std::uint32_t words[2];
      encode_codes(values, args.format, 1.0f, 1.0f, words);
      codes[0][r] = words[0];
      codes[1][r] = words[1];
    }
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      std::uint32_t turned[4];
      turn_bytes(codes[word], turned);
#pragma unroll
      for (int i = 0; i < 4; ++i) tile.put(local + 4 * word + i, thread.row_group, turned[i]);
    }
  }
  __syncthreads();
  if (args.t)
    store_columns<kAccess == Access::vector>(tile, thread, args.t, tile_row, std::int64_t{tile_column}, args.rows,
                                             std::int64_t{args.columns});
}

struct Kernels {
  LoadedKernel<ColumnsArguments> amax, codes;
};

template <Access kAccess>
Kernels load(DType type, CudaContext& context) {
  return with_element(type, [&](auto element) {
    KernelFunction<ColumnsArguments> amax = column_amax_kernel<decltype(element), kAccess>,
                                     codes = column_codes_kernel<decltype(element), kAccess>;
    return Kernels{load_kernel(amax, dim3(kLanes, kStrands), context.multiprocessors),
                   load_kernel(codes, dim3(kTileThreads), context.multiprocessors)};
  });
}

Launch prepare(const OpInstance& op, CudaContext& context) {
  const Matrix size = matrix_of(op, 0);
  const DType type = op.inputs[0].dtype, format = *dtype_named(op.attributes.word("format"));
  const Kernels vector = load<Access::vector>(type, context), scalar = load<Access::scalar>(type, context);
  const bool whole = size.columns % 8 == 0 && size.rows % 16 == 0;
  const std::int64_t across = ceil_divide(size.columns * static_cast<std::int64_t>(size_of(type)), 16 * kLanes);
  const std::int64_t parts = std::max<std::int64_t>(1, kBlocks / std::max<std::int64_t>(across, 1));
  const std::int64_t stretch = std::max<std::int64_t>(4 * kStrands, ceil_divide(size.rows, parts));
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    if (size.rows == 0) return;
    cudaStream_t stream = stream_of(exec);
    ColumnsArguments args{.x = in[0].data,
                          .t = out[0].as<std::uint8_t>(),
                          .scale = out[1].as<float>(),
                          .amax = static_cast<std::uint32_t*>(exec.workspace),
                          .rows = size.rows,
                          .stretch = stretch,
                          .columns = static_cast<int>(size.columns),
                          .tiles = static_cast<int>(across),
                          .format = format};
    QUERN_CUDA(cudaMemsetAsync(args.amax, 0, static_cast<std::size_t>(size.columns) * sizeof(float), stream));
    const Kernels& kernels = whole && aligned_16({args.x, args.t}) ? vector : scalar;
    kernels.amax.launch(across * ceil_divide(size.rows, stretch), stream, args);
    args.tiles = static_cast<int>(ceil_divide(size.columns, kTileSide));
    kernels.codes.launch(args.tiles * ceil_divide(size.rows, kTileSide), stream, args);
  };
}

OpSupport query(const OpInstance& op, const CudaTraits&) {
  const auto [rows, columns] = matrix_of(op, 0);
  OperandCheck check(op, 1, 2);
  const DType format = check_format(check, op);
  check.input(0, "x", extents_of(op, 0)).that(extents_of(op, 0).size() == 2, "needs a matrix x");
  check.output(0, "t", {columns, rows}, format).output(1, "scale", {columns}, DType::f32);
  return check.support(static_cast<std::size_t>(columns) * sizeof(float));
}

}  // namespace

void add_quantize_columns_op(OpTable& table) { table["quantize_columns"] = {prepare, query}; }

}  // namespace quern::cuda
