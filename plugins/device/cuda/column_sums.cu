#include "column_sums.h"

#include "element.cuh"
#include "launch.cuh"

namespace quern::cuda {

namespace {

constexpr int kColumns = 32, kStrands = 16;  // of a block: strand s sums rows s, s + kStrands, ...

struct SumArguments {
  const float* partials;
  std::int64_t count, pitch;
  int columns;
  void* sum;
  bool accumulate;
};

template <class T>
__global__ void __launch_bounds__(kColumns* kStrands) sum_partial_rows_kernel(const SumArguments args) {
  __shared__ float strands[kStrands][kColumns];
  const int column = static_cast<int>(blockIdx.x) * kColumns + static_cast<int>(threadIdx.x);
  float total = 0;
  if (column < args.columns) {
#pragma unroll 8
    for (std::int64_t row = threadIdx.y; row < args.count; row += kStrands)
      total += args.partials[row * args.pitch + column];
  }
  strands[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.y != 0 || column >= args.columns) return;
  for (int strand = 1; strand < kStrands; ++strand) total += strands[strand][threadIdx.x];
  T* sum = static_cast<T*>(args.sum) + column;
  *sum = from_float<T>(args.accumulate ? to_float(*sum) + total : total);
}

constexpr dim3 kBlock(kColumns, kStrands);

}  // namespace

void load_column_sums() {
  load_kernel<SumArguments>(sum_partial_rows_kernel<float>, kBlock, 1);
  load_kernel<SumArguments>(sum_partial_rows_kernel<bf16>, kBlock, 1);
}

void sum_partial_rows(const float* partials, std::int64_t count, std::int64_t pitch, const View& sum, bool accumulate,
                      cudaStream_t stream) {
  std::int64_t columns = sum.count();
  if (columns == 0) return;
  with_element(sum.dtype, [&](auto element) {
    LoadedKernel<SumArguments> kernel{sum_partial_rows_kernel<decltype(element)>, kBlock};
    kernel.launch(ceil_divide(columns, kColumns), stream,
                  {partials, count, pitch, static_cast<int>(columns), sum.data, accumulate});
  });
}

}  // namespace quern::cuda
