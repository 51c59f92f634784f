#pragma once
// What both kernels of AdamW with moments in 8 bits share: their arguments, a block's scale, and an element's code.

#include "optimizer/update_rules.cuh"
#include "primitives/divide.cuh"
#include "primitives/philox.cuh"
#include "primitives/scale.cuh"
#include "primitives/tensor_list.cuh"

namespace quern::cuda::adamw_8bit {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kChunk = 16 * kWarps;  // blocks of elements

enum Tensor : int { kMaster, kMoment1, kMoment2, kScales1, kScales2, kUpdated };

struct BlockTensor {
  const void* gradient;
  void* updated[kUpdated];  ///< null: scales of a moment that is not in 8 bits
  std::int64_t count;       ///< blocks
  std::int64_t offset;
  int columns;
  FastDivide row_blocks = FastDivide(1);
  std::uint32_t object;
  bool aligned;  ///< neighbours can be read and written four at once
};

struct BlockArguments {
  TensorList<BlockTensor> list;
  const UpdateState* update;
  const StepState* step;
  AdamwRule::Constants constants;
  DType gradient, dtypes[3];  ///< of master and moments
};

struct BlockScale {
  float scale, inverse;
};

__device__ __forceinline__ BlockScale block_scale(float amax, DType format) {
  if (format == DType::e4m3) {
    const float scale = format_scale(amax, format);
    return {scale, inverse_power(scale)};
  }
  constexpr float kInverse = 1.0f / 127.0f;
  const std::uint32_t bits = __float_as_uint(amax);
  const float near = amax * kInverse;
  float scale = fmaxf(fmaf(fmaf(-127.0f, near, amax), kInverse, near), 0x1p-126f);
  if (bits == 0) scale = 1.0f;
  if (bits >= 0x7f800000u) scale = __uint_as_float(0x7fc00000u);
  // No quotient reaches 127, and none needs to be brought back.
  return {scale, Swift::reciprocal(scale) * (1.0f - 0x1p-22f)};
}

/// 128 + a fraction of one, of the second moment by the upper half.
template <int kMoment>
__device__ __forceinline__ float above_128(std::uint32_t random) {
  return __uint_as_float(__byte_perm(random, 0x43000000u, kMoment == kMoment1 ? 0x7410 : 0x7432));
}

/// Where an element's code is in the word that draw_code gives.
template <DType kFormat, int kMoment>
inline constexpr int kCodeByte = kFormat == DType::e4m3 ? 3
                                 : kMoment == kMoment2  ? 2
                                                        : 0;

/// The code of a moment, of the second one's root: a byte of the word. Both moments of an element share a random word's
/// halves, and a code is the integer below value / scale + the half's fraction of one. A root that is not zero has a
/// code of 1 or more.
template <DType kFormat, int kMoment>
__device__ __forceinline__ std::uint32_t draw_code(float value, float inverse, std::uint32_t random) {
  constexpr bool kRoot = kMoment == kMoment2;
  if constexpr (kFormat == DType::i8) {
    const float sum = __fmaf_rd(value, inverse, above_128<kMoment>(random));
    if constexpr (kRoot) return __float_as_uint(value > 0 ? fmaxf(sum, 129.0f) : sum);  // 7 bits behind the exponent
    return __float_as_uint(__fadd_rd(sum, 0x1.8p23f - 128.0f));
  } else {
    // From 2^-6 on a code's bits are the number's; below they count 2^-9, and 2^-6 is 8 of these.
    const float quotient = value * inverse, magnitude = fabsf(quotient);
    const std::uint32_t bits = __float_as_uint(magnitude);
    const std::uint32_t large = (bits << 4) + __byte_perm(random, 0x40u, kRoot ? 0x4325 : 0x4105);  // -(120 << 27)
    const float sum = __fmaf_rd(magnitude, 512.0f, above_128<kMoment>(random));
    const std::uint32_t small = __float_as_uint(kRoot && value > 0 ? fmaxf(sum, 129.0f) : sum) << 8;
    const std::uint32_t code = magnitude >= 0x1p-6f ? large : small;
    return kRoot ? code : (code & 0x7fffffffu) | (__float_as_uint(value) & 0x80000000u);
  }
}

/// For the op: the kernel of tensors whose rows and addresses are multiples of eight elements; null where there is
/// none, for moments of different formats.
KernelFunction<BlockArguments> choose_neighbours(DType gradient, DType master, DType moment1, DType moment2,
                                                 std::int64_t block);

}  // namespace quern::cuda::adamw_8bit
