#include "engine/host_tensor.h"

#include <algorithm>
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
  } else {
    fail_internal("decode", "no storage of weights in " + std::string(name_of(dtype)));
  }
}

}  // namespace quern
