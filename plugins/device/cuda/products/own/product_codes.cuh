#pragma once
// What Epilogues (product_kept.cuh) that end in codes make of values, in the registers of who multiplies. Shared memory
// is used for transposed codes alone.

#include "primitives/scale.cuh"
#include "products/own/product_kept.cuh"
#include "quantization/tile_quantize.cuh"

namespace quern::cuda::product {

__device__ __forceinline__ Pack<bf16> read_pack(std::uint32_t address) {
  Pack<bf16> pack;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(pack.word[0]), "=r"(pack.word[1]), "=r"(pack.word[2]), "=r"(pack.word[3])
               : "r"(address)
               : "memory");
  return pack;
}

/// The largest magnitudes so far; NaNs take no part.
__device__ __forceinline__ void take_magnitudes(__nv_bfloat162& most, const Pack<bf16>& values) {
#pragma unroll
  for (int i = 0; i < 4; ++i) most = __hmax2(most, __habs2(reinterpret_cast<const __nv_bfloat162&>(values.word[i])));
}

/// Codes of a unit. `inverse`, of the scale, is a power of two: codes of products with it in bf16 are the same.
template <DType kFormat>
__device__ __forceinline__ uint2 codes_of(const Pack<bf16>& values, __nv_bfloat162 inverse) {
  Pack<bf16> products;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    reinterpret_cast<__nv_bfloat162&>(products.word[i]) =
        __hmul2(reinterpret_cast<const __nv_bfloat162&>(values.word[i]), inverse);
  const Floats<bf16> scaled = unpack(products);
  std::uint32_t words[2];
  encode_float8(scaled.at, kFormat, 1.0f, words);
  return make_uint2(words[0], words[1]);
}

/// What a warp transposes codes in.
class TurnedCodes {
 public:
  /// Of a warp in shared memory: a group's codes, 16 rows of 32 columns, the lower rows' 64 bytes on.
  static constexpr std::uint32_t kBytes = 4 * 128 + 64, kShared = 4 * kMultipliers * kBytes;

  __device__ __forceinline__ explicit TurnedCodes(std::uint32_t memory)
      : memory_(memory + static_cast<std::uint32_t>(threadIdx.x) / 32 * kBytes) {}

  /// Writes a group's codes, of the warp's upper and lower 8 rows, transposed: `t` is at its first row and column of
  /// (columns, rows). Pairs of columns are transposed as elements of 16 bits, and taken apart by two permutes; two
  /// lanes then have the 16 rows of two columns.
  __device__ __forceinline__ void write(std::uint8_t* t, std::int64_t rows, uint2 upper, uint2 lower,
                                        bool inside) const {
    const std::uint32_t lane = threadIdx.x % 32;
    auto place = [&](std::uint32_t half, std::uint32_t word, std::uint32_t row) {
      return memory_ + (2 * half + word) * 128 + half * 64 + row * 16;
    };
    __syncwarp();  // the last group is read
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(
                     place(lane / 16, lane / 8 % 2, lane % 8)),
                 "r"(upper.x), "r"(upper.y), "r"(lower.x), "r"(lower.y)
                 : "memory");
    __syncwarp();
    const std::uint32_t half = lane % 2, word = lane / 16, row = lane / 2 % 8;
    const Pack<bf16> pairs = read_pack(place(half, word, row));
    std::uint8_t* to = t + (row / 2 * 8 + word * 4 + row % 2 * 2) * rows + half * 8;
    if (!inside) return;
#pragma unroll
    for (std::uint32_t i = 0; i < 2; ++i) {
      const std::uint32_t bytes = i == 0 ? 0x6420 : 0x7531;
      *reinterpret_cast<uint2*>(to + i * rows) = make_uint2(__byte_perm(pairs.word[0], pairs.word[1], bytes),
                                                            __byte_perm(pairs.word[2], pairs.word[3], bytes));
    }
  }

 private:
  std::uint32_t memory_;
};

/// The codes of units in e4m3 or e5m2 under one scale and their largest magnitude, without a branch, which would part
/// the work of one unit from that of the next.
template <DType kFormat>
class Codes {
 public:
  __device__ __forceinline__ Codes(const QuantizeArguments& args, std::uint32_t memory)
      : quantizer_(args), turned_(memory), inverse_(__float2bfloat162_rn(quantizer_.inverse())) {}

  /// Values are zero where they are not inside.
  __device__ __forceinline__ uint2 write(const QuantizeArguments& to, const Pack<bf16>& values, std::int64_t at,
                                         bool inside) {
    take_magnitudes(most_, values);
    const uint2 codes = codes_of<kFormat>(values, inverse_);
    if (inside && quantizer_.writes()) *reinterpret_cast<uint2*>(to.q + at) = codes;
    return codes;
  }
  __device__ __forceinline__ void write_transposed(std::uint8_t* t, std::int64_t rows, uint2 upper, uint2 lower,
                                                   bool inside) const {
    turned_.write(t, rows, upper, lower, inside && quantizer_.writes());
  }

  /// By all threads that multiply.
  __device__ void finish(const QuantizeArguments& args) {
    const float largest[2] = {__low2float(most_), __high2float(most_)};
    quantizer_.measure(args, largest);
    quantizer_.finish(args, static_cast<int>(threadIdx.x), [] {
      asm volatile("bar.sync 1, %0;" ::"n"(kMultiplying) : "memory");
    });
  }

 private:
  Quantizer<Formats::float8> quantizer_;
  TurnedCodes turned_;
  __nv_bfloat162 inverse_, most_ = __floats2bfloat162_rn(0.0f, 0.0f);
};

}  // namespace quern::cuda::product
