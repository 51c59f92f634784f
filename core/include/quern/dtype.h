#pragma once
// Element types of tensors. Numeric formats and their rounding are in numeric.h.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace quern {

enum class DType : std::uint8_t { f64, f32, bf16, e4m3, e5m2, i8, u8, u16, i32, u32, i64 };

/// Bytes of one element.
constexpr std::size_t size_of(DType type) {
  switch (type) {
    case DType::f64:
    case DType::i64: return 8;
    case DType::f32:
    case DType::i32:
    case DType::u32: return 4;
    case DType::bf16:
    case DType::u16: return 2;
    case DType::e4m3:
    case DType::e5m2:
    case DType::i8:
    case DType::u8: return 1;
  }
  return 0;
}

/// Short name as configs and printed programs use it: "f32", "bf16", "e4m3", ...
std::string_view name_of(DType type);
/// The type with that name; "fp32" and "float32" style spellings are accepted for f32, bf16 and f64.
std::optional<DType> dtype_named(std::string_view name);

/// f32, bf16, e4m3, e5m2, f64: types that hold real numbers.
constexpr bool is_floating(DType type) { return type <= DType::e5m2; }

}  // namespace quern
