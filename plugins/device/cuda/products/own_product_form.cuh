#pragma once
// The own products of one pair of formats.

#include "products/own_product.h"
#include "products/product_launch.cuh"
#include "products/product_store.cuh"

namespace quern::cuda::product {

/// By tiles of 128 x kColumns; kBuffers of a Stored.
template <class Formats, int kColumns, int kBuffers>
struct TiledProduct {
  using Sum = typename Formats::Sum;
  using Finish = Stored<Sum, kColumns, kBuffers>;
  using Launch = ProductLaunch<Formats, Columns::along, Finish>;

  static void load() { Launch::load(); }

  static void run(const MatmulKey& key, const MatmulOperands& o, const OwnTiling& tiling, int multiprocessors,
                  cudaStream_t stream) {
    Operands operands{};
    for (int half = 0; half < 2; ++half) {
      operands.b[half] = tensor_map(key.b, {key.k, key.n, 1}, o.b, {Formats::kDepth, kColumns / 2, 1});
      operands.b_step[half] = kColumns;
      operands.b_first[half] = half * kColumns / 2;
    }
    const Extent extent{key.m, key.n, key.k, tiling.parts, tiling.divided};
    constexpr std::uint32_t kChunkColumns = 8 * kChunk;
    const Destination to{.y = {tensor_map(DType::bf16, {key.n, key.m, 1}, o.y, {kChunkColumns, 16, 1}),
                               tensor_map(DType::bf16, {key.n, key.m, 1}, o.y, {kChunkColumns / 2, 16, 1})},
                         .add = key.accumulate,
                         .scales = {.a = o.scale_a,
                                    .b = o.scale_b,
                                    .bias = key.bias ? static_cast<const bf16*>(o.bias) : nullptr,
                                    .rows = static_cast<int>(key.m),
                                    .columns = static_cast<int>(key.n),
                                    .by_row = key.scales == ScaleMode::vector},
                         .parts = o.workspace};
    Launch::run(extent, operands, key.a, o.a, to, multiprocessors, stream);
    if (tiling.divided == 0) return;
    constexpr int kGroups = Finish::kGroups, kChunks = (kGroups + kChunk - 1) / kChunk;
    add_parts_kernel<Sum>
        <<<static_cast<unsigned>(tiling.divided * kCluster * kMultipliers * kChunks), 128, 0, stream>>>(
            to, operands.grid, kGroups);
    QUERN_CUDA(cudaGetLastError());
  }
};

template <class Formats>
struct OwnProductForm {
  using Of256 = TiledProduct<Formats, 256, 2>;
  using Of224 = TiledProduct<Formats, 224, 2>;
  using Of192 = TiledProduct<Formats, 192, 3>;

  static void load() {
    Of256::load();
    Of224::load();
    Of192::load();
    cudaFuncAttributes attributes;
    QUERN_CUDA(cudaFuncGetAttributes(&attributes, add_parts_kernel<typename Formats::Sum>));  // loads the code
  }

  static void run(const MatmulKey& key, const MatmulOperands& o, int multiprocessors, cudaStream_t stream) {
    if (key.m == 0 || key.n == 0) return;
    const OwnTiling tiling = own_tiling(key.m, key.n, key.k);
    const auto of = tiling.columns == 256 ? Of256::run : tiling.columns == 224 ? Of224::run : Of192::run;
    of(key, o, tiling, multiprocessors, stream);
  }
};

}  // namespace quern::cuda::product
