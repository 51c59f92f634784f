// quantize_columns: x (N, C) to t (C, N), in 8 bits with one scale a column of x, so that the matmuls that sum over
// tokens can have one a row. A pass for the columns' amax, a pass that writes. quantize_rows_columns: quantize_rows and
// quantize_columns of one x, whose first pass quantizes the rows as well.

#include "quantization/line_quantize.cuh"
#include "quantization/quantize_ops.h"

namespace quern::cuda {

namespace {

constexpr int kLanes = 32, kStrands = 8;  // of a block of the first pass: packs of its columns; rows at once
constexpr std::int64_t kBlocks = 2048;    // about as many, to fill any GPU

struct ColumnsArguments {
  const void* x;               ///< (N, C)
  std::uint32_t* amax;         ///< (C), bits
  std::int64_t rows, stretch;  ///< stretch: rows of a block
  int columns, tiles;          ///< tiles: across
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

struct Kernels {
  LoadedKernel<ColumnsArguments> amax;
  LoadedKernel<LineArguments<Copy>> codes;
};

template <Access kAccess>
Kernels load(const OpInstance& op, CudaContext& context) {
  return with_element(op.inputs[0].dtype, [&](auto element) {
    KernelFunction<ColumnsArguments> amax = column_amax_kernel<decltype(element), kAccess>;
    return Kernels{load_kernel(amax, dim3(kLanes, kStrands), context.multiprocessors),
                   load_lines<Copy, kAccess>(op, matrix_of(op, 0).columns, context.multiprocessors).columns};
  });
}

Launch prepare(const OpInstance& op, CudaContext& context) {
  const Matrix size = matrix_of(op, 0);
  const DType type = op.inputs[0].dtype;
  const QuantizedFormat format = line_format(op);
  const Kernels vector = load<Access::vector>(op, context), scalar = load<Access::scalar>(op, context);
  const bool whole = size.columns % 8 == 0 && size.rows % 16 == 0;
  const std::int64_t across = ceil_divide(size.columns * static_cast<std::int64_t>(size_of(type)), 16 * kLanes);
  const std::int64_t parts = std::max<std::int64_t>(1, kBlocks / std::max<std::int64_t>(across, 1));
  const std::int64_t stretch = std::max<std::int64_t>(4 * kStrands, ceil_divide(size.rows, parts));
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    if (size.rows == 0) return;
    cudaStream_t stream = stream_of(exec);
    const int columns = static_cast<int>(size.columns);
    auto* amax = static_cast<std::uint32_t*>(exec.workspace);
    QUERN_CUDA(cudaMemsetAsync(amax, 0, line_workspace(size.columns, 1), stream));
    const Kernels& kernels = whole && aligned_16({in[0].data, out[0].data}) ? vector : scalar;
    kernels.amax.launch(across * ceil_divide(size.rows, stretch), stream,
                        {in[0].data, amax, size.rows, stretch, columns, static_cast<int>(across), format.dtype});
    LineArguments<Copy> args{.producer = {in[0].data},
                             .t = out[0].as<std::uint8_t>(),
                             .t_scale = out[1].as<float>(),
                             .column_amax = amax,
                             .rows = size.rows,
                             .width = columns,
                             .format = format.dtype,
                             .largest = format.largest,
                             .column_tiles = static_cast<int>(ceil_divide(size.columns, kTileSide))};
    kernels.codes.launch(args.column_tiles * ceil_divide(size.rows, kTileSide), stream, args);
  };
}

OpSupport query(const OpInstance& op, const CudaTraits&) {
  const auto [rows, columns] = matrix_of(op, 0);
  OperandCheck check(op, 1, 2);
  const DType format = check_line_format(check, op).dtype;
  check.input(0, "x", extents_of(op, 0)).that(extents_of(op, 0).size() == 2, "needs a matrix x");
  check.output(0, "t", {columns, rows}, format).output(1, "scale", {columns}, DType::f32);
  return check.support(line_workspace(columns, 1));
}

// ---- quantize_rows_columns ----

Launch prepare_both(const OpInstance& op, CudaContext& context) {
  const Matrix size = matrix_of(op, 0);
  return prepare_lines<Copy>(op, context, size.rows, size.columns, -1,
                             [](std::span<const View> in) { return Copy{in[0].data}; });
}

OpSupport query_both(const OpInstance& op, const CudaTraits&) {
  const auto [rows, columns] = matrix_of(op, 0);
  OperandCheck check(op, 1, 4);
  check.input(0, "x", extents_of(op, 0)).that(extents_of(op, 0).size() == 2, "needs a matrix x");
  check_lines(check, op, 0, rows, columns, 1);
  return check.support(line_workspace(columns, 1));
}

}  // namespace

void add_quantize_columns_ops(OpTable& table) {
  table["quantize_columns"] = {prepare, query};
  table["quantize_rows_columns"] = {prepare_both, query_both};
}

}  // namespace quern::cuda
