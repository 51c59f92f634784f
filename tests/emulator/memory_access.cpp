// Loads and stores of threads.
#include <cstring>
#include <type_traits>

#include "emulator/machine.h"
#include "emulator/registers.h"

namespace quern::emulator {

namespace {

template <class T, int kCount, bool kLoad, bool kShared>
void access(std::uint64_t* r, const Instruction& i, Thread& thread) {
  constexpr int kBytes = kCount * static_cast<int>(sizeof(T));
  constexpr Does kDoes = kLoad ? Does::read : Does::write;
  const std::uint64_t address = r[i.a] + static_cast<std::uint64_t>(i.offset);
  std::uint8_t* const at =
      kShared ? shared_at(thread, address, kBytes, kDoes) : memory_at(thread, address, kBytes, kDoes);
  for (std::size_t k = 0; k < kCount; ++k) {
    if constexpr (kLoad) {
      T value;
      std::memcpy(&value, at + k * sizeof(T), sizeof(T));
      if constexpr (std::is_signed_v<T>)  // fills a register of 32 bits
        r[i.values[k]] = low(static_cast<std::uint64_t>(std::int64_t{value}));
      else
        r[i.values[k]] = value;
    } else {
      const auto value = static_cast<T>(r[i.values[k]]);
      std::memcpy(at + k * sizeof(T), &value, sizeof(T));
    }
  }
}

template <class T, int kCount>
Run access_of(bool load, bool shared) {
  return load ? (shared ? access<T, kCount, true, true> : access<T, kCount, true, false>)
              : (shared ? access<T, kCount, false, true> : access<T, kCount, false, false>);
}

template <class T>
Run access_of(bool load, bool shared, int count) {
  return count == 1   ? access_of<T, 1>(load, shared)
         : count == 2 ? access_of<T, 2>(load, shared)
         : count == 4 ? access_of<T, 4>(load, shared)
                      : nullptr;
}

}  // namespace

Run memory_access(bool load, bool shared, std::string_view type, int count) {
  if (type == "s8" && load) return access_of<std::int8_t>(load, shared, count);
  if (type == "s16" && load) return access_of<std::int16_t>(load, shared, count);
  switch (type.back()) {
    case '8': return access_of<std::uint8_t>(load, shared, count);
    case '6': return access_of<std::uint16_t>(load, shared, count);
    case '2': return access_of<std::uint32_t>(load, shared, count);
    case '4': return access_of<std::uint64_t>(load, shared, count);
    default: return nullptr;
  }
}

}  // namespace quern::emulator
