#pragma once
// Formats of weights in 8 bits and fewer, a table. A row of a matrix becomes integers from -largest to largest, packed
// into bytes, and scales: w is about integer * scale. Kernels take a row of the table; a format needs none of its own.

#include <cstdint>
#include <string_view>

#include "quern/dtype.h"

namespace quern {

struct WeightFormat {
  /// Of so many elements: their largest magnitude is `largest` scales, or the mean of their magnitudes is one.
  enum class Scale : std::uint8_t { amax, mean };

  std::string_view name;
  int bits = 8;            ///< of an integer; of the 8 / bits in a byte the first has the lowest bits
  int largest = 127;       ///< magnitude; in packed bytes integers are in two's complement
  std::int64_t group = 0;  ///< consecutive elements of a row that share a scale; 0: all of the row
  Scale scale = Scale::amax;

  constexpr DType dtype() const { return bits == 8 ? DType::i8 : DType::u8; }
  constexpr std::int64_t row_bytes(std::int64_t columns) const { return columns * bits / 8; }
  constexpr std::int64_t row_scales(std::int64_t columns) const { return group == 0 ? 1 : columns / group; }
  /// Whether rows of so many elements are whole bytes and groups.
  constexpr bool takes(std::int64_t columns) const {
    return columns % (8 / bits) == 0 && (group == 0 || columns % group == 0);
  }
};

inline constexpr WeightFormat kWeightFormats[] = {
    {"int8", 8, 127, 0, WeightFormat::Scale::amax},
    {"int4", 4, 7, 32, WeightFormat::Scale::amax},
    {"ternary", 2, 1, 0, WeightFormat::Scale::mean},  // Ma et al., "The Era of 1-bit LLMs" (2024), by rows
};

/// Null: there is none of that name.
constexpr const WeightFormat* weight_format_named(std::string_view name) {
  for (const WeightFormat& format : kWeightFormats)
    if (format.name == name) return &format;
  return nullptr;
}

}  // namespace quern
