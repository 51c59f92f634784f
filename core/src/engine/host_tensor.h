#pragma once
// Floats and a tensor's stored elements, on the host.

#include <cstddef>
#include <cstdint>
#include <span>

#include "quern/dtype.h"

namespace quern {

/// `values` rounded to nearest into elements of `dtype` (f32 or bf16).
void encode(std::span<const float> values, DType dtype, std::byte* out);
/// The other way; exact. Of i8 the integers.
void decode(const std::byte* in, DType dtype, std::span<float> values);

// ---- matrices in int8 with a scale for each row (quern/weight_format.h) ----
/// Rows of so many columns as integers, and their scales.
void encode_rows(std::span<const float> values, std::int64_t columns, std::byte* out, std::span<float> scales);
/// Multiplies integers of elements first, first + 1, ... by the scales of their rows.
void scale_rows(std::span<const float> scales, std::int64_t columns, std::int64_t first, std::span<float> values);

}  // namespace quern
