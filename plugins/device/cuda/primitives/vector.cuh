#pragma once
// Sixteen bytes at a time: a Pack is what one load or store instruction moves, 8 bf16 or 4 fp32 elements. Kernels index
// work by packs whatever the access, so that an odd size or address changes how memory is read and no sum's order.

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "primitives/element.cuh"

namespace quern::cuda {

/// How packs are read and written.
enum class Access {
  vector,  ///< rows begin at 16-byte addresses and hold whole packs
  tail,    ///< rows begin at 16-byte addresses; the last pack may be cut short
  scalar,  ///< element by element: any address, any size
};

template <Access kAccess>
using AccessConstant = std::integral_constant<Access, kAccess>;

/// Elements of a pack.
template <class T>
inline constexpr int kPack = 16 / static_cast<int>(sizeof(T));

/// Whether packs of all these pointers (null: not used) can be read at once.
inline bool aligned_16(std::initializer_list<const void*> pointers) {
  std::uintptr_t bits = 0;
  for (const void* pointer : pointers) bits |= reinterpret_cast<std::uintptr_t>(pointer);
  return bits % 16 == 0;
}

/// Elements as they are in memory.
template <class T>
struct alignas(16) Pack {
  std::uint32_t word[4];
};

/// The same elements as fp32.
template <class T>
struct Floats {
  float at[kPack<T>];
};

__device__ __forceinline__ Floats<float> unpack(const Pack<float>& pack) {
  Floats<float> values;
#pragma unroll
  for (int i = 0; i < 4; ++i) values.at[i] = __uint_as_float(pack.word[i]);
  return values;
}

__device__ __forceinline__ Floats<bf16> unpack(const Pack<bf16>& pack) {
  Floats<bf16> values;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values.at[2 * i] = __uint_as_float(pack.word[i] << 16);
    values.at[2 * i + 1] = __uint_as_float(pack.word[i] & 0xffff0000u);
  }
  return values;
}

/// Rounds to the nearest, ties to even.
__device__ __forceinline__ Pack<float> round_pack(const Floats<float>& values) {
  Pack<float> pack;
#pragma unroll
  for (int i = 0; i < 4; ++i) pack.word[i] = __float_as_uint(values.at[i]);
  return pack;
}

__device__ __forceinline__ Pack<bf16> round_pack(const Floats<bf16>& values) {
  Pack<bf16> pack;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(values.at[2 * i], values.at[2 * i + 1]);  // the first is low
    pack.word[i] = *reinterpret_cast<const std::uint32_t*>(&pair);
  }
  return pack;
}

__device__ __forceinline__ std::uint32_t bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ std::uint32_t bits_of(bf16 x) { return __bfloat16_as_ushort(x); }
__device__ __forceinline__ void write_bits(float* to, std::uint32_t bits) { *to = __uint_as_float(bits); }
__device__ __forceinline__ void write_bits(bf16* to, std::uint32_t bits) {
  *to = __ushort_as_bfloat16(static_cast<unsigned short>(bits));
}

/// Elements [at, at + kPack) of a row; those from `columns` on are zero and not read.
template <Access kAccess, class T, class Index>
__device__ __forceinline__ Pack<T> load_pack(const T* row, Index at, Index columns) {
  Pack<T> pack{};
  if constexpr (kAccess == Access::vector) {
    if (at < columns) {
      const uint4 bits = *reinterpret_cast<const uint4*>(row + at);
      pack = {{bits.x, bits.y, bits.z, bits.w}};
    }
    return pack;
  } else {
    if constexpr (kAccess == Access::tail)
      if (at + kPack<T> <= columns) return load_pack<Access::vector>(row, at, columns);
    constexpr int kPerWord = kPack<T> / 4;
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i)
      if (at + i < columns) pack.word[i / kPerWord] |= bits_of(row[at + i]) << (16 * (i % kPerWord));
    return pack;
  }
}

/// Writes a pack's elements that are below `columns`.
template <Access kAccess, class T, class Index>
__device__ __forceinline__ void store_pack(T* row, Index at, Index columns, const Pack<T>& pack) {
  if constexpr (kAccess == Access::vector) {
    if (at < columns)
      *reinterpret_cast<uint4*>(row + at) = make_uint4(pack.word[0], pack.word[1], pack.word[2], pack.word[3]);
  } else {
    if constexpr (kAccess == Access::tail)
      if (at + kPack<T> <= columns) return store_pack<Access::vector>(row, at, columns, pack);
    constexpr int kPerWord = kPack<T> / 4;
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i)
      if (at + i < columns) write_bits(row + at + i, pack.word[i / kPerWord] >> (16 * (i % kPerWord)));
  }
}

}  // namespace quern::cuda
