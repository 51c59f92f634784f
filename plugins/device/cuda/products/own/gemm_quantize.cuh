#pragma once
// Quantization in Epilogues (gemm_overlapped_epilogue.cuh), in the registers of the consumers.
// Only transposed values pass through shared memory.

#include "primitives/scale.cuh"
#include "products/own/gemm_overlapped_epilogue.cuh"
#include "quantization/tile_quantize.cuh"

namespace quern::cuda::gemm {

/// The largest magnitudes so far; NaNs take no part.
__device__ __forceinline__ void take_magnitudes(__nv_bfloat162& most, const Pack<bf16>& values) {
#pragma unroll
  for (int i = 0; i < 4; ++i) most = __hmax2(most, __habs2(reinterpret_cast<const __nv_bfloat162&>(values.word[i])));
}

/// A unit quantized. `inverses`, of each value's scale, are powers of two: multiplied by them in bf16 values give the
/// same result.
template <DType kFormat>
__device__ __forceinline__ uint2 codes_of(const Pack<bf16>& values, const Pack<bf16>& inverses) {
  Pack<bf16> products;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    reinterpret_cast<__nv_bfloat162&>(products.word[i]) =
        __hmul2(reinterpret_cast<const __nv_bfloat162&>(values.word[i]),
                reinterpret_cast<const __nv_bfloat162&>(inverses.word[i]));
  const Floats<bf16> scaled = unpack(products);
  std::uint32_t words[2];
  encode_float8(scaled.at, kFormat, 1.0f, words);
  return make_uint2(words[0], words[1]);
}
/// Of one scale.
template <DType kFormat>
__device__ __forceinline__ uint2 codes_of(const Pack<bf16>& values, __nv_bfloat162 inverse) {
  const auto word = reinterpret_cast<const std::uint32_t&>(inverse);
  return codes_of<kFormat>(values, Pack<bf16>{{word, word, word, word}});
}

/// Transposed quantized values on their way to memory: a consumer puts groups of 32 columns of its rows, which are
/// paired (Rows), where the copy engine writes them from. There is room for kGroups, twice: for those being put and
/// those being written.
template <int kGroups>
class TransposedValues {
  static constexpr std::uint32_t kGroup = kDealtRows * kHalfRows;  ///< bytes, as a box of a dealt map

 public:
  static constexpr std::uint32_t kShared = kConsumers * 2 * kGroups * kGroup;

  __device__ __forceinline__ explicit TransposedValues(std::uint32_t memory)
      : memory_(memory + threadIdx.x / 128 * 2 * kGroups * kGroup) {}

  /// Of a thread's neighbouring rows. Pairs of rows are transposed as elements of 16 bits: matrix i has columns 2 i and
  /// 2 i + 1 of each lane's eight.
  __device__ __forceinline__ void put(int group, uint2 upper, uint2 lower) const {
    const std::uint32_t lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, swizzled = (warp ^ lane / 2 % 4) * 16;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(
                     memory_ + turn_ + group * kGroup + lane * kHalfRows + swizzled),
                 "r"(__byte_perm(upper.x, lower.x, 0x5140)), "r"(__byte_perm(upper.x, lower.x, 0x7362)),
                 "r"(__byte_perm(upper.y, lower.y, 0x5140)), "r"(__byte_perm(upper.y, lower.y, 0x7362))
                 : "memory");
  }
  /// By all threads of a consumer: the groups that were put are written, by write(at) of one thread, where at(group) is
  /// its address.
  template <class Write>
  __device__ __forceinline__ void send(Write write) {
    tma::fence_copies();
    const bool writes = threadIdx.x % 128 == 0;
    if (writes) tma::wait_stores_read();  // of the next group's place
    synchronize();
    if (writes) {
      write([from = memory_ + turn_](int group) { return from + group * kGroup; });
      tma::commit_stores();
    }
    turn_ ^= kGroups * kGroup;
  }
  /// The threads of a consumer wait for each other.
  static __device__ __forceinline__ void synchronize() {
    asm volatile("bar.sync %0, 128;" ::"r"(kFirstBarrier + threadIdx.x / 128) : "memory");
  }
  __device__ __forceinline__ void end() const { tma::wait_stores_read(); }

 private:
  static constexpr std::uint32_t kFirstBarrier = 3;

  std::uint32_t memory_, turn_ = 0;
};

/// Units in e4m3 or e5m2 under one scale and their largest magnitude, without a branch, which would separate
/// the code of one unit from the next one's.
template <DType kFormat>
class Codes {
 public:
  __device__ __forceinline__ explicit Codes(const QuantizeArguments& args)
      : quantizer_(args), inverse_(__float2bfloat162_rn(quantizer_.inverse())) {}

  __device__ __forceinline__ bool writes() const { return quantizer_.writes(); }

  /// Values are zero where they are not inside.
  __device__ __forceinline__ uint2 write(const QuantizeArguments& to, const Pack<bf16>& values, std::int64_t at,
                                         bool inside) {
    take_magnitudes(most_, values);
    const uint2 codes = codes_of<kFormat>(values, inverse_);
    store_unit(to.q + at, codes, inside && writes());
    return codes;
  }

  /// By all consumer threads.
  __device__ void finish(const QuantizeArguments& args) {
    const float largest[2] = {__low2float(most_), __high2float(most_)};
    quantizer_.measure(args, largest);
    quantizer_.finish(args, static_cast<int>(threadIdx.x), [] {
      asm volatile("bar.sync 1, %0;" ::"n"(kConsumerThreads) : "memory");
    });
  }

 private:
  Quantizer<Formats::float8> quantizer_;
  __nv_bfloat162 inverse_, most_ = __floats2bfloat162_rn(0.0f, 0.0f);
};

}  // namespace quern::cuda::gemm
