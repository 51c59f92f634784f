#pragma once
// Mainloop of GEMMs (gemm_wgmma.cuh) whose first operand, of 8-bit floats, is not K-major. The tensor
// cores take only K-major operands of 8 bits, but the first from registers too, and on the way there it is transposed
// (wgmma::TransposedA).

#include "products/own/gemm_wgmma.cuh"

namespace quern::cuda::gemm {

/// Words of a thread for a stage of the first operand.
inline constexpr int kTransposedWords = 4 * kSteps;
__device__ __forceinline__ void load_transposed(std::uint32_t (&a)[kTransposedWords], const wgmma::TransposedA& turned,
                                                std::uint32_t box) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k) turned.load(a + 4 * k, box, k);
}

/// Accumulators stay in the tensor cores, which keep about 14 bits.
template <class Formats, class Memory>
class TransposingFast {
 public:
  static constexpr int kAccumulators = Memory::kColumns / 2;

  __device__ TransposingFast(const Operands&, const Memory& shared, int number)
      : shared_(shared), stages_(shared), turned_(number) {}

  __device__ __forceinline__ void begin(const WorkTile& item, float (&sums)[kAccumulators]) {
    std::uint32_t even[kTransposedWords],
        odd[kTransposedWords];  // of which one is loaded while the other is multiplied
    int step = item.first;
    for (; step + 1 < item.last; step += 2) {
      multiply(even, step > item.first, sums);
      multiply(odd, true, sums);
    }
    if (step < item.last) multiply(even, step > item.first, sums);
  }
  __device__ __forceinline__ void finish(float (&sums)[kAccumulators]) {
    stages_.finish();
    wgmma::pin(sums);
  }

 private:
  __device__ __forceinline__ void multiply(std::uint32_t (&a)[kTransposedWords], bool add,
                                           float (&sums)[kAccumulators]) {
    const int stage = stages_.next();
    load_transposed(a, turned_, shared_.a(stage));
    const wgmma::Tile b = wgmma::k_major_tile(shared_.b(stage));
    wgmma::fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) Formats::multiply(sums, a + 4 * k, b + k * wgmma::kDepthBytes, add || k > 0);
    tma::fence_copies();  // threads read the first operand
    stages_.begun(stage);
  }

  const Memory& shared_;
  OverlappedStages<Memory> stages_;
  wgmma::TransposedA turned_;
};

/// Accumulators of each stage, 128 terms, are added in fp32: a quarter of the columns while the next is multiplied, and
/// while the other consumer works.
template <class Formats, class Memory>
class TransposingExact {
 public:
  static constexpr int kAccumulators = Memory::kColumns / 2;

  __device__ TransposingExact(const Operands&, const Memory& shared, int number)
      : shared_(shared), stages_(shared), turned_(number) {}

  __device__ __forceinline__ void begin(const WorkTile& item, float (&sums)[kAccumulators]) {
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) sums[i] = 0;
    for (int step = item.first; step < item.last; ++step) add(sums);
  }
  __device__ __forceinline__ void finish(float (&)[kAccumulators]) {}

 private:
  static constexpr int kParts = 4, kPart = kAccumulators / kParts;

  __device__ __forceinline__ void add(float (&sums)[kAccumulators]) {
    const int stage = stages_.next();
    std::uint32_t a[kTransposedWords];
    load_transposed(a, turned_, shared_.a(stage));
    float parts[2][kPart];
    auto begin_part = [&](int part) {
      const wgmma::Tile b = wgmma::k_major_tile(shared_.b(stage)) + part * (2 * kPart * wgmma::kRowBytes);
      wgmma::fence();
#pragma unroll
      for (int k = 0; k < kSteps; ++k) Formats::multiply(parts[part % 2], a + 4 * k, b + k * wgmma::kDepthBytes, k > 0);
      wgmma::commit();
    };
    auto add_part = [&](int part) {
      wgmma::pin(parts[part % 2]);
#pragma unroll
      for (int i = 0; i < kPart; ++i) sums[part * kPart + i] += parts[part % 2][i];
    };
    begin_part(0);
#pragma unroll
    for (int part = 1; part < kParts; ++part) {
      begin_part(part);
      wgmma::wait<1>();
      add_part(part - 1);
    }
    wgmma::wait<0>();
    tma::fence_copies();
    stages_.free(stage);
    add_part(kParts - 1);
  }

  const Memory& shared_;
  Stages<Memory> stages_;
  wgmma::TransposedA turned_;
};

template <class OfFormats, bool kFast>
struct TransposingMainloop {
  using Formats = OfFormats;
  static constexpr Rows kLayoutA = Rows::mn_major;
  static constexpr Columns kLayoutB = Columns::k_major;
  template <class Memory>
  using On = std::conditional_t<kFast, TransposingFast<Formats, Memory>, TransposingExact<Formats, Memory>>;
};

}  // namespace quern::cuda::gemm
