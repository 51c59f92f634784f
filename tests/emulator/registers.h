#pragma once
// Values in registers of 64 bits.

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace quern::emulator {

template <class T>
T get(std::uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
/// Results that are NaN have one pattern, as on a GPU.
template <class T>
std::uint64_t bits_of(T value) {
  if constexpr (std::is_floating_point_v<T>)
    if (value != value) return sizeof(T) == 4 ? 0x7fffffff : 0x7fffffffffffffff;
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}
inline std::uint32_t low(std::uint64_t bits) { return static_cast<std::uint32_t>(bits); }

inline std::uint16_t to_half(float value) { return get<std::uint16_t>(bits_of(static_cast<_Float16>(value))); }
inline float from_half(std::uint64_t bits) { return static_cast<float>(get<_Float16>(bits)); }

}  // namespace quern::emulator
