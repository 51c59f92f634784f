#pragma once
// Launches of product_wgmma.cuh.

#include <algorithm>

#include "primitives/tensor_map.h"
#include "products/product_wgmma.cuh"
#include "runtime/check.h"
#include "runtime/launch.cuh"

namespace quern::cuda::product {

/// Rows of the first operand, columns of the result that tiles count (Epilogue::kWidth each), and what is summed over.
struct Extent {
  std::int64_t rows = 0, width = 0, depth = 0;
};

/// Coordinates and numbers of tiles are 32-bit.
inline constexpr std::int64_t kMostElements = std::int64_t{1} << 30;

template <class Formats, Columns kLayout, class Scaling, class Epilogue>
struct ProductLaunch {
  /// To be called by `prepare`.
  static void load() {
    find_tensor_map_encoder();
    QUERN_CUDA(
        cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(Shared::kBytes)));
  }

  /// `operands.b`, its steps and firsts are set; a (rows, depth).
  static void run(const Extent& e, Operands& operands, DType type_a, const void* a,
                  const typename Scaling::Arguments& scaling, const typename Epilogue::Arguments& epilogue,
                  int multiprocessors, cudaStream_t stream) {
    constexpr int kGroup = 8;
    operands.a = tensor_map(type_a, {e.depth, e.rows, 1}, a, {Formats::kDepth, kRows, 1});
    operands.steps = static_cast<int>(ceil_divide(e.depth, Formats::kDepth));
    operands.grid = {.row_pairs = static_cast<int>(ceil_divide(e.rows, kRows * kCluster)),
                     .columns = static_cast<int>(ceil_divide(e.width, Epilogue::kWidth)),
                     .group = kGroup};
    const int clusters = std::min(std::max(multiprocessors / kCluster, 1), operands.grid.tiles());
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {.x = kCluster, .y = 1, .z = 1};
    cudaLaunchConfig_t config{};
    config.gridDim = static_cast<unsigned>(clusters * kCluster);
    config.blockDim = kThreads;
    config.dynamicSmemBytes = Shared::kBytes;
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = 1;
    QUERN_CUDA(cudaLaunchKernelEx(&config, kKernel, operands, scaling, epilogue));
  }

 private:
  static constexpr auto kKernel = product_kernel<Formats, kLayout, Scaling, Epilogue>;
};

}  // namespace quern::cuda::product
