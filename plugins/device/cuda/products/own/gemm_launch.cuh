#pragma once
// Launches of gemm_wgmma.cuh.

#include <algorithm>

#include "primitives/tensor_map.h"
#include "products/own/gemm_wgmma.cuh"
#include "runtime/check.h"
#include "runtime/launch.cuh"

namespace quern::cuda::gemm {

/// Rows of the first operand, columns of the result in tiles (Epilogue::kWidth each), and the contracted dimension.
struct Extent {
  std::int64_t rows = 0, width = 0, depth = 0;
  int parts = 1;              ///< split-K of the last tiles
  int divided = 0;            ///< pairs of tiles under split-K
  std::int64_t a_stride = 0;  ///< elements between rows of the first operand as stored; 0: contiguous
};

/// Coordinates and numbers of tiles are 32-bit.
inline constexpr std::int64_t kMostElements = std::int64_t{1} << 30;

template <class Formats, class Epilogue>
Grid grid_of(const Extent& e) {
  Grid grid{.row_pairs = static_cast<int>(ceil_divide(e.rows, kRows * kCluster)),
            .columns = static_cast<int>(ceil_divide(e.width, Epilogue::kWidth)),
            .steps = static_cast<int>(ceil_divide(e.depth, Formats::kDepth)),
            .whole = 0,
            .parts = e.parts};
  // Of a shorter K the last stages are of zeros.
  if constexpr (IsOverlapped<Epilogue>) grid.steps = std::max(grid.steps, Epilogue::kParts);
  grid.whole = grid.tiles() - e.divided;
  return grid;
}

/// A second operand (width, depth) for tiles of `columns`, the halves of which two blocks load.
inline void set_k_major(Operands& operands, DType type, std::int64_t width, std::int64_t depth, const void* b,
                        std::int64_t stride, int columns) {
  const auto box = static_cast<std::uint32_t>(columns / 2),
             row = wgmma::kRowBytes / static_cast<std::uint32_t>(size_of(type));
  for (int half = 0; half < 2; ++half) {
    operands.b[half] = tensor_map(type, {depth, width, 1}, b, {row, box, 1}, stride);
    operands.b_step[half] = columns;
    operands.b_first[half] = half * columns / 2;
  }
}

/// One that is not K-major, (depth, width) of bf16: boxes of 64 columns, and for the last of an odd number of them
/// halves along k, which two blocks load.
inline void set_mn_major(Operands& operands, std::int64_t width, std::int64_t depth, const void* b, std::int64_t stride,
                         int columns) {
  for (int half = 0; half < 2; ++half) {
    operands.b[half] = tensor_map(DType::bf16, {width, depth, 1}, b,
                                  {wgmma::kColumns, static_cast<std::uint32_t>(OfBf16::kDepth >> half), 1}, stride);
    operands.b_step[half] = columns;
    operands.b_first[half] = 0;
  }
}

template <class Mainloop, class Epilogue>
struct GemmLaunch {
  using Formats = typename Mainloop::Formats;
  using Memory = typename Epilogue::Memory;

  /// To be called by `prepare`.
  static void load() {
    find_tensor_map_encoder();
    QUERN_CUDA(
        cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(Memory::kBytes)));
  }

  /// `operands.b`, its steps and firsts are set; a as Mainloop::kLayoutA says.
  static void run(const Extent& e, Operands& operands, DType type_a, const void* a,
                  const typename Epilogue::Arguments& arguments, int multiprocessors, cudaStream_t stream) {
    constexpr std::uint32_t kDepth = Formats::kDepth;
    operands.a = Mainloop::kLayoutA == Rows::paired ? paired_tensor_map(type_a, e.rows, e.depth, a, kRows)
                 : Mainloop::kLayoutA == Rows::k_major
                     ? tensor_map(type_a, {e.depth, e.rows, 1}, a, {kDepth, kRows, 1}, e.a_stride)
                     : tensor_map(type_a, {e.rows, e.depth, 1}, a, {kDepth, kDepth, 1}, e.a_stride);
    operands.grid = grid_of<Formats, Epilogue>(e);
    const int clusters = std::min(std::max(multiprocessors / kCluster, 1), operands.grid.items());
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {.x = kCluster, .y = 1, .z = 1};
    cudaLaunchConfig_t config{};
    config.gridDim = static_cast<unsigned>(clusters * kCluster);
    config.blockDim = kThreads;
    config.dynamicSmemBytes = Memory::kBytes;
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = 1;
    QUERN_CUDA(cudaLaunchKernelEx(&config, kKernel, operands, arguments));
  }

 private:
  static constexpr auto kKernel = gemm_kernel<Mainloop, Epilogue>;
};

}  // namespace quern::cuda::gemm
