#include "elementwise/column_sums.h"

#include <type_traits>

#include "primitives/element.cuh"
#include "runtime/launch.cuh"

namespace quern::cuda {

namespace {

constexpr int kColumns = 32, kStrands = 16;  // of a block: strand s sums rows s, s + kStrands, ...

/// One sum's columns, and where they go.
struct Sum {
  const float* partials;
  void* to;
  int columns, blocks;
  bool accumulate, halves;  ///< halves: bf16, else f32
};

struct SumArguments {
  Sum first, second;
  std::int64_t count, pitch;
};

template <class T>
__device__ __forceinline__ void write_sum(void* sums, int column, bool accumulate, float total) {
  T* sum = static_cast<T*>(sums) + column;
  *sum = from_float<T>(accumulate ? to_float(*sum) + total : total);
}

__global__ void __launch_bounds__(kColumns* kStrands) sum_partial_rows_kernel(const SumArguments args) {
  __shared__ float strands[kStrands][kColumns];
  const int block = static_cast<int>(blockIdx.x);
  const bool first = block < args.first.blocks;
  const Sum sum = first ? args.first : args.second;
  const int column = (first ? block : block - args.first.blocks) * kColumns + static_cast<int>(threadIdx.x);
  float total = 0;
  if (column < sum.columns) {
#pragma unroll 8
    for (std::int64_t row = threadIdx.y; row < args.count; row += kStrands)
      total += sum.partials[row * args.pitch + column];
  }
  strands[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.y != 0 || column >= sum.columns) return;
  for (int strand = 1; strand < kStrands; ++strand) total += strands[strand][threadIdx.x];
  sum.halves ? write_sum<bf16>(sum.to, column, sum.accumulate, total)
             : write_sum<float>(sum.to, column, sum.accumulate, total);
}

constexpr dim3 kBlock(kColumns, kStrands);

Sum sum_of(const PartialRows& rows) {
  if (!rows.sum) return {};
  const std::int64_t columns = rows.sum.count();
  const bool halves =
      with_element(rows.sum.dtype, [](auto element) { return std::is_same_v<decltype(element), bf16>; });
  return {rows.partials,   rows.sum.data, static_cast<int>(columns), static_cast<int>(ceil_divide(columns, kColumns)),
          rows.accumulate, halves};
}

}  // namespace

void load_column_sums() { load_kernel<SumArguments>(sum_partial_rows_kernel, kBlock, 1); }

void sum_partial_rows(const float* partials, std::int64_t count, std::int64_t pitch, const View& sum, bool accumulate,
                      cudaStream_t stream) {
  sum_partial_rows({partials, sum, accumulate}, {}, count, pitch, stream);
}

void sum_partial_rows(const PartialRows& first, const PartialRows& second, std::int64_t count, std::int64_t pitch,
                      cudaStream_t stream) {
  const SumArguments args{sum_of(first), sum_of(second), count, pitch};
  const int blocks = args.first.blocks + args.second.blocks;
  if (blocks == 0) return;
  LoadedKernel<SumArguments>{sum_partial_rows_kernel, kBlock}.launch(blocks, stream, args);
}

}  // namespace quern::cuda
