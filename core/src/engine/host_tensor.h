#pragma once
// Floats and a tensor's stored elements, on the host.

#include <cstddef>
#include <span>

#include "quern/dtype.h"

namespace quern {

/// `values` rounded to nearest into elements of `dtype` (f32 or bf16).
void encode(std::span<const float> values, DType dtype, std::byte* out);
/// The other way; exact.
void decode(const std::byte* in, DType dtype, std::span<float> values);

}  // namespace quern
