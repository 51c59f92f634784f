#pragma once
// What the emulated driver writes into a CUtensorMap.

#include <cstdint>

namespace quern::emulator {

struct TensorMap {
  enum class Kind : std::uint8_t { bytes, bf16, f32 };

  std::uint64_t base;
  std::uint64_t strides[4];  ///< bytes, from the second dimension on
  std::int64_t sizes[5];     ///< elements
  std::uint16_t box[5];
  std::uint8_t rank, element_bytes;
  std::uint8_t swizzle;  ///< 0: none; 1, 2, 3: 32, 64, 128 bytes
  Kind kind;
};
static_assert(sizeof(TensorMap) <= 128);

}  // namespace quern::emulator
