#pragma once
// The own GEMMs of one pair of formats.

#include "products/own/gemm_launch.cuh"
#include "products/own/gemm_rescaling.cuh"
#include "products/own/gemm_store_epilogue.cuh"
#include "products/own/gemm_tile_scales.cuh"
#include "products/own/gemm_transposing.cuh"
#include "products/own/own_matmul.h"

namespace quern::cuda::gemm {

/// By tiles of 128 x kColumns; kBuffers of a StoredMemory.
template <class Mainloop, OutputLayout kOutputLayout, int kColumns, int kBuffers>
struct TiledGemm {
  using Formats = typename Mainloop::Formats;
  using Sum = typename Formats::Sum;
  static constexpr bool kMnMajor = Mainloop::kLayoutB == Columns::mn_major;
  static constexpr int kLoaded =
      kMnMajor ? (kColumns + wgmma::kColumns - 1) / wgmma::kColumns * wgmma::kColumns : kColumns;
  static constexpr std::uint32_t kBeside = beside_bytes<Mainloop>(kColumns);
  using Epilogue = StoreEpilogue<Sum, kOutputLayout, StoredMemory<kColumns, kBuffers, kLoaded, kBeside>>;
  using Launch = GemmLaunch<Mainloop, Epilogue>;
  static constexpr int kStages = Epilogue::Memory::kStages;

  static void load() { Launch::load(); }

  static void run(const OwnOperands& o, const OwnTiling& tiling, int multiprocessors, cudaStream_t stream) {
    Operands operands{};
    if constexpr (kMnMajor)
      set_mn_major(operands, o.columns, o.depth, o.b, o.b_stride, kColumns);
    else
      set_k_major(operands, o.b_type, o.columns, o.depth, o.b, o.b_stride, kColumns);
    if (of_blocks(o.scales)) {
      operands.scale_a = {o.scale_a, static_cast<int>(o.rows), static_cast<int>(o.rows), kScaleBlock};
      operands.scale_b = {o.scale_b, static_cast<int>(o.columns), static_cast<int>(o.columns), kScaleBlock};
      if (o.scales == ScaleMode::square_block)
        operands.scale_b.step = 1, operands.scale_b.square = static_cast<int>(square_scales(o.columns, o.depth)[1]);
    }
    const Extent extent{o.rows, o.columns, o.depth, tiling.parts, tiling.divided, o.a_stride};
    const Destination to{.y = {y_map(o, kChunk), y_map(o, kChunk / 2)},
                         .add = o.add,
                         .scales = {.a = of_blocks(o.scales) ? nullptr : o.scale_a,
                                    .b = of_blocks(o.scales) ? nullptr : o.scale_b,
                                    .bias = static_cast<const bf16*>(o.bias),
                                    .rows = static_cast<int>(o.rows),
                                    .columns = static_cast<int>(o.columns),
                                    .by_row = o.scales == ScaleMode::vector},
                         .parts = o.workspace};
    Launch::run(extent, operands, o.a_type, o.a, to, multiprocessors, stream);
    if (tiling.divided == 0) return;
    constexpr int kGroups = Epilogue::kGroups, kChunks = (kGroups + kChunk - 1) / kChunk;
    add_split_k_kernel<Sum, kOutputLayout>
        <<<static_cast<unsigned>(tiling.divided * kCluster * kConsumers * kChunks), 128, 0, stream>>>(to, operands.grid,
                                                                                                      kGroups);
    QUERN_CUDA(cudaGetLastError());
  }

 private:
  static CUtensorMap y_map(const OwnOperands& o, int groups) {
    const auto columns = static_cast<std::uint32_t>(8 * groups);
    return kOutputLayout == OutputLayout::transposed
               ? tensor_map(DType::bf16, {o.rows, o.columns, 1}, o.y, {kHalfRows, columns, 1}, o.y_stride)
               : tensor_map(DType::bf16, {o.columns, o.rows, 1}, o.y, {columns, 16, 1}, o.y_stride);
  }
};

template <class Mainloop, OutputLayout kOutputLayout>
struct OwnMatmulForm {
  static_assert(!WritesBeside<Mainloop> || kOutputLayout != OutputLayout::transposed,
                "turns are taken at barriers that a turned y needs");
  /// Of bf16 there is room for the results of a whole tile beside three stages, so that consumers never wait for
  /// writes.
  static constexpr bool kBf16 = std::is_same_v<typename Mainloop::Formats, OfBf16>;
  static constexpr int kWideBuffers = kBf16 ? 4 : 2;
  static constexpr int kMostBuffers = beside_bytes<Mainloop>(256) > 256 ? 1 : kWideBuffers;  // as many as fit
  using Of256 = TiledGemm<Mainloop, kOutputLayout, 256, kMostBuffers>;
  using Of224 = TiledGemm<Mainloop, kOutputLayout, 224, kWideBuffers>;
  using Of192 = TiledGemm<Mainloop, kOutputLayout, 192, 3>;
  static constexpr int kLeastStages = kBf16 ? 3 : 4;
  static_assert(Of256::kStages >= kLeastStages && Of224::kStages >= kLeastStages && Of192::kStages >= 4);

  static void load() {
    Of256::load();
    Of224::load();
    Of192::load();
    cudaFuncAttributes attributes;
    QUERN_CUDA(cudaFuncGetAttributes(
        &attributes, add_split_k_kernel<typename Mainloop::Formats::Sum, kOutputLayout>));  // loads the code
  }

  static void run(const OwnOperands& o, int multiprocessors, cudaStream_t stream) {
    if (o.rows == 0 || o.columns == 0) return;
    const OwnTiling tiling = own_tiling(o.rows, o.columns, o.depth, o.a_type);
    const auto of = tiling.columns == 256 ? Of256::run : tiling.columns == 224 ? Of224::run : Of192::run;
    of(o, tiling, multiprocessors, stream);
  }
};

template <class Mainloop, OutputLayout kOutputLayout>
constexpr OwnMatmul own_matmul() {
  return {OwnMatmulForm<Mainloop, kOutputLayout>::load, OwnMatmulForm<Mainloop, kOutputLayout>::run};
}

}  // namespace quern::cuda::gemm
