#pragma once
// Sums of products (product_wgmma.cuh) whose first operand, of floats of 8 bits, lies across the sums. The tensor cores
// take operands of 8 bits along them only, but the first from registers too, and on the way there it is turned
// (wgmma::TurnedA).

#include "products/own/product_wgmma.cuh"

namespace quern::cuda::product {

/// Words of a thread for a stage of the first operand.
inline constexpr int kTurnedWords = 4 * kSteps;
__device__ __forceinline__ void load_turned(std::uint32_t (&a)[kTurnedWords], const wgmma::TurnedA& turned,
                                            std::uint32_t box) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k) turned.load(a + 4 * k, box, k);
}

/// Sums stay in the tensor cores, which keep about 14 bits.
template <class Formats, class Memory>
class TurningFast {
 public:
  static constexpr int kSums = Memory::kColumns / 2;

  __device__ TurningFast(const Operands&, const Memory& shared, int number)
      : shared_(shared), stages_(shared), turned_(number) {}

  __device__ __forceinline__ void begin(const Item& item, float (&sums)[kSums]) {
    std::uint32_t even[kTurnedWords], odd[kTurnedWords];  // of which one is loaded while the other is multiplied
    int step = item.first;
    for (; step + 1 < item.last; step += 2) {
      multiply(even, step > item.first, sums);
      multiply(odd, true, sums);
    }
    if (step < item.last) multiply(even, step > item.first, sums);
  }
  __device__ __forceinline__ void finish(float (&sums)[kSums]) {
    stages_.finish();
    wgmma::pin(sums);
  }

 private:
  __device__ __forceinline__ void multiply(std::uint32_t (&a)[kTurnedWords], bool add, float (&sums)[kSums]) {
    const int stage = stages_.next();
    load_turned(a, turned_, shared_.a(stage));
    const wgmma::Tile b = wgmma::along_rows(shared_.b(stage));
    wgmma::fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) Formats::multiply(sums, a + 4 * k, b + k * wgmma::kDepthBytes, add || k > 0);
    tma::fence_copies();  // threads read the first operand
    stages_.begun(stage);
  }

  const Memory& shared_;
  OverlappedStages<Memory> stages_;
  wgmma::TurnedA turned_;
};

/// Sums of each stage, 128 terms, are added in fp32: a quarter of the columns while the next is multiplied, and while
/// the other multiplier works.
template <class Formats, class Memory>
class TurningExact {
 public:
  static constexpr int kSums = Memory::kColumns / 2;

  __device__ TurningExact(const Operands&, const Memory& shared, int number)
      : shared_(shared), stages_(shared), turned_(number) {}

  __device__ __forceinline__ void begin(const Item& item, float (&sums)[kSums]) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = 0;
    for (int step = item.first; step < item.last; ++step) add(sums);
  }
  __device__ __forceinline__ void finish(float (&)[kSums]) {}

 private:
  static constexpr int kParts = 4, kPart = kSums / kParts;

  __device__ __forceinline__ void add(float (&sums)[kSums]) {
    const int stage = stages_.next();
    std::uint32_t a[kTurnedWords];
    load_turned(a, turned_, shared_.a(stage));
    float parts[2][kPart];
    auto begin_part = [&](int part) {
      const wgmma::Tile b = wgmma::along_rows(shared_.b(stage)) + part * (2 * kPart * wgmma::kRowBytes);
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
  wgmma::TurnedA turned_;
};

template <class OfFormats, bool kFast>
struct TurningSums {
  using Formats = OfFormats;
  static constexpr Rows kRowsLie = Rows::across;
  static constexpr Columns kColumnsLie = Columns::along;
  template <class Memory>
  using On = std::conditional_t<kFast, TurningFast<Formats, Memory>, TurningExact<Formats, Memory>>;
};

}  // namespace quern::cuda::product
