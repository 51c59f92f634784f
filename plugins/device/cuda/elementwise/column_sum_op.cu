// The sum over tokens of every column: a bias's gradient.

#include "elementwise/column_sum_order.cuh"
#include "elementwise/elementwise_ops.h"
#include "primitives/vector.cuh"
#include "runtime/operand_check.h"

namespace quern::cuda {

namespace {

template <class T>
inline constexpr int kTileColumns = 2 * 8 * kPack<T>;  // two packs a thread, eight threads a row

struct ColumnArguments {
  const void* x;    ///< (N, C)
  float* partials;  ///< (sum_tiles(N), C)
  std::int64_t rows;
  int columns, column_tiles;
};

template <class T, Access kAccess>
__global__ void __launch_bounds__(kTileThreads) column_sum_kernel(const ColumnArguments args) {
  constexpr int kColumns = kTileColumns<T>;
  __shared__ ColumnStrands<kColumns> strands;
  const TileThread thread(static_cast<int>(threadIdx.x));
  const int tile_column = static_cast<int>(blockIdx.x) % args.column_tiles * kColumns;
  const std::int64_t tile = static_cast<int>(blockIdx.x) / args.column_tiles;
  const std::int64_t first_row = tile * kTileSide + 4 * thread.row_group;
  Pack<T> packs[2][4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int r = 0; r < 4; ++r)
      packs[half][r] = load_pack<kAccess>(static_cast<const T*>(args.x) + (first_row + r) * args.columns,
                                          tile_column + (8 * half + thread.lane) * kPack<T>,
                                          first_row + r < args.rows ? args.columns : 0);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sums[kPack<T>] = {};
#pragma unroll
    for (int r = 0; r < 4; ++r) add_row(sums, unpack(packs[half][r]).at);
    strands.put(thread, (8 * half + thread.lane) * kPack<T>, sums);
  }
  __syncthreads();
  const int column = static_cast<int>(threadIdx.x);
  if (column < kColumns && tile_column + column < args.columns)
    args.partials[tile * args.columns + tile_column + column] = strands.total(column);
}

// x (N, C) -> sum (C)
Launch prepare_column_sum(const OpInstance& op, CudaContext& context) {
  const Matrix size = matrix_of(op, 0);
  const DType type = op.inputs[0].dtype;
  const bool whole = size.columns * static_cast<std::int64_t>(size_of(type)) % 16 == 0;
  const bool accumulate = op.outputs[0].accumulate;
  const std::int64_t column_tiles = with_element(
      type, [&](auto element) { return ceil_divide(size.columns, std::int64_t{kTileColumns<decltype(element)>}); });
  auto load = [&](auto access) {
    return with_element(type, [&](auto element) {
      KernelFunction<ColumnArguments> kernel = column_sum_kernel<decltype(element), access()>;
      return load_kernel(kernel, dim3(kTileThreads), context.multiprocessors);
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
                         .column_tiles = static_cast<int>(column_tiles)};
    const std::int64_t tiles = sum_tiles(size.rows), blocks = tiles * column_tiles;
    const auto& kernel = whole && aligned_16({args.x}) ? vector : scalar;
    if (blocks > 0) kernel.launch(blocks, stream_of(exec), args);
    sum_partial_rows(args.partials, tiles, size.columns, out[0], accumulate, stream_of(exec));
  };
}

OpSupport query_column_sum(const OpInstance& op, const CudaTraits&) {
  const Matrix size = matrix_of(op, 0);
  OperandCheck check(op, 1, 1);
  check.input(0, "x", extents_of(op, 0)).sum(0, "sum", {size.columns});
  return check.support(partial_bytes(sum_tiles(size.rows), size.columns));
}

}  // namespace

void add_column_sum_op(OpTable& table) { table["column_sum"] = {prepare_column_sum, query_column_sum}; }

}  // namespace quern::cuda
