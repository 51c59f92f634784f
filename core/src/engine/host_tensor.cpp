#include "engine/host_tensor.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "quern/error.h"
#include "quern/numeric.h"

namespace quern {

void encode(std::span<const float> values, DType dtype, std::byte* out) {
  if (dtype == DType::f32) {
    std::memcpy(out, values.data(), values.size_bytes());
  } else if (dtype == DType::bf16) {
    std::transform(values.begin(), values.end(), reinterpret_cast<std::uint16_t*>(out), float_to_bf16);
  } else {
    fail_internal("encode", "no storage of weights in " + std::string(name_of(dtype)));
  }
}

void decode(const std::byte* in, DType dtype, std::span<float> values) {
  if (dtype == DType::f32) {
    std::memcpy(values.data(), in, values.size_bytes());
  } else if (dtype == DType::bf16) {
    const auto* bits = reinterpret_cast<const std::uint16_t*>(in);
    std::transform(bits, bits + values.size(), values.begin(), bf16_to_float);
  } else if (dtype == DType::i8) {
    const auto* integers = reinterpret_cast<const std::int8_t*>(in);
    std::copy_n(integers, values.size(), values.begin());
  } else {
    fail_internal("decode", "no storage of weights in " + std::string(name_of(dtype)));
  }
}

void encode_rows(std::span<const float> values, std::int64_t columns, std::byte* out, std::span<float> scales) {
  const auto width = static_cast<std::size_t>(columns);
  for (std::size_t row = 0; row < scales.size(); ++row) {
    const std::span<const float> x = values.subspan(row * width, width);
    float largest = 0;
    for (const float value : x) largest = std::max(largest, std::fabs(value));
    scales[row] = format_scale(largest, DType::i8);
    std::transform(x.begin(), x.end(), reinterpret_cast<std::int8_t*>(out) + row * width,
                   [inverse = 1.0f / scales[row]](float value) { return float_to_i8(value * inverse); });
  }
}

void scale_rows(std::span<const float> scales, std::int64_t columns, std::int64_t first, std::span<float> values) {
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] *= scales[static_cast<std::size_t>((first + static_cast<std::int64_t>(i)) / columns)];
}

}  // namespace quern
