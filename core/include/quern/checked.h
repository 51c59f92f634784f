#pragma once
// Arithmetic on sizes that come from a config or a file: extents, elements, bytes, offsets. None is negative. A result
// that 63 bits cannot hold is a resources error instead of a number that wrapped.

#include <cstdint>

namespace quern {

/// Throws the resources error for `a` `operation` `b`.
[[noreturn]] void fail_too_large(std::int64_t a, char operation, std::int64_t b);

inline std::int64_t checked_product(std::int64_t a, std::int64_t b) {
  std::int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) fail_too_large(a, '*', b);
  return product;
}

inline std::int64_t checked_sum(std::int64_t a, std::int64_t b) {
  std::int64_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) fail_too_large(a, '+', b);
  return sum;
}

/// The smallest multiple of `step` that is at least `size`.
inline std::int64_t rounded_up(std::int64_t size, std::int64_t step) {
  return checked_sum(size, step - 1) / step * step;
}

}  // namespace quern
