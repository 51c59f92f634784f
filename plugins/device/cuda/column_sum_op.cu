// The sum over tokens of every column: a bias's gradient. A block sums a tile of columns over a stretch of rows into a
// partial row; the partial rows are then added in order.

#include "column_sums.h"
#include "elementwise_ops.h"
#include "launch.cuh"
#include "operand_check.h"
#include "vector.cuh"

namespace quern::cuda {

namespace {

constexpr int kLanes = 32, kStrands = 8;  // of a block: packs of its tile; strand s sums rows s, s + kStrands, ...
constexpr std::int64_t kBlocks = 1024;    // about as many, to fill any GPU

struct ColumnArguments {
  const void* x;    ///< (N, C)
  float* partials;  ///< (stretches, C)
  std::int64_t rows;
  int columns, tiles;
  std::int64_t stretch;  ///< rows of a block
};

template <class T, Access kAccess>
__global__ void __launch_bounds__(kLanes* kStrands) column_sum_kernel(const ColumnArguments args) {
  __shared__ float strands[kStrands][kLanes * kPack<T>];
  const int tile = static_cast<int>(blockIdx.x) % args.tiles;
  const std::int64_t part = static_cast<int>(blockIdx.x) / args.tiles;
  const int lane_column = static_cast<int>(threadIdx.x) * kPack<T>, tile_column = tile * kLanes * kPack<T>;
  const std::int64_t begin = part * args.stretch;
  const std::int64_t end = begin + args.stretch < args.rows ? begin + args.stretch : args.rows;
  Floats<T> sums = {};
#pragma unroll 4
  for (std::int64_t row = begin + threadIdx.y; row < end; row += kStrands) {
    const T* x = static_cast<const T*>(args.x) + row * args.columns;
    const Floats<T> values = unpack(load_pack<kAccess>(x, tile_column + lane_column, args.columns));
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) sums.at[i] += values.at[i];
  }
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) strands[threadIdx.y][lane_column + i] = sums.at[i];
  __syncthreads();
  for (int column = static_cast<int>(threadIdx.y) * kLanes + static_cast<int>(threadIdx.x); column < kLanes * kPack<T>;
       column += kLanes * kStrands) {
    float total = 0;
    for (int strand = 0; strand < kStrands; ++strand) total += strands[strand][column];
    if (tile_column + column < args.columns) args.partials[part * args.columns + tile_column + column] = total;
  }
}

/// How the matrix is cut, from its size alone.
struct Cut {
  std::int64_t tiles, stretch, parts;
};
Cut cut_of(const Matrix& size, DType type) {
  std::int64_t tile = kLanes * 16 / static_cast<std::int64_t>(size_of(type));
  std::int64_t tiles = std::max<std::int64_t>(1, ceil_divide(size.columns, tile));
  std::int64_t parts = std::max<std::int64_t>(1, kBlocks / tiles);
  std::int64_t stretch = std::max<std::int64_t>(4 * kStrands, ceil_divide(size.rows, parts));
  return {tiles, stretch, std::max<std::int64_t>(1, ceil_divide(size.rows, stretch))};
}

// x (N, C) -> sum (C)
Launch prepare_column_sum(const OpInstance& op, CudaContext& context) {
  const Matrix size = matrix_of(op, 0);
  const DType type = op.inputs[0].dtype;
  const Cut cut = cut_of(size, type);
  const bool whole = size.columns * static_cast<std::int64_t>(size_of(type)) % 16 == 0;
  const bool accumulate = op.outputs[0].accumulate;
  auto load = [&](auto access) {
    return with_element(type, [&](auto element) {
      KernelFunction<ColumnArguments> kernel = column_sum_kernel<decltype(element), access()>;
      return load_kernel(kernel, dim3(kLanes, kStrands), context.multiprocessors);
    });
  };
  auto vector = load(AccessConstant<Access::vector>{}), scalar = load(AccessConstant<Access::scalar>{});
  load_column_sums();
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    if (!out[0]) return;
    ColumnArguments args{.x = in[0].data,
                         .partials = static_cast<float*>(exec.workspace),
                         .rows = size.rows,
                         .columns = static_cast<int>(size.columns),
                         .tiles = static_cast<int>(cut.tiles),
                         .stretch = cut.stretch};
    const auto& kernel = whole && aligned_16({args.x}) ? vector : scalar;
    kernel.launch(cut.tiles * cut.parts, stream_of(exec), args);
    sum_partial_rows(args.partials, cut.parts, size.columns, out[0], accumulate, stream_of(exec));
  };
}

OpSupport query_column_sum(const OpInstance& op, const CudaTraits&) {
  const Matrix size = matrix_of(op, 0);
  OperandCheck check(op, 1, 1);
  check.input(0, "x", extents_of(op, 0)).sum(0, "sum", {size.columns});
  if (!check.ok()) return check.support();
  return check.support(partial_bytes(cut_of(size, op.inputs[0].dtype).parts, size.columns));
}

}  // namespace

void add_column_sum_op(OpTable& table) { table["column_sum"] = {prepare_column_sum, query_column_sum}; }

}  // namespace quern::cuda
