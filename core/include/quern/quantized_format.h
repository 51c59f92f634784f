#pragma once
// Formats that ops quantize operands of matmuls to, a table: values of a dtype of 8 bits, of magnitudes up to
// `largest`. Kernels take a row of the table; a format needs none of its own.

#include <string_view>

#include "quern/dtype.h"

namespace quern {

struct QuantizedFormat {
  std::string_view name;
  DType dtype = DType::i8;
  float largest = 127;
};

/// i4: integers that 4 bits hold, one in a byte, for int8 matmuls.
inline constexpr QuantizedFormat kQuantizedFormats[] = {
    {"e4m3", DType::e4m3, 448}, {"e5m2", DType::e5m2, 57344}, {"i8", DType::i8, 127}, {"i4", DType::i8, 7}};

/// Null: there is none of that name.
constexpr const QuantizedFormat* quantized_format_named(std::string_view name) {
  for (const QuantizedFormat& format : kQuantizedFormats)
    if (format.name == name) return &format;
  return nullptr;
}

/// As format_scale of the dtype (quern/numeric.h), but integers' scale is amax / largest.
float format_scale(float amax, const QuantizedFormat& format);

}  // namespace quern
