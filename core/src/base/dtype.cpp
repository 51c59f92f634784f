#include "quern/dtype.h"

#include <array>
#include <utility>

namespace quern {

namespace {
constexpr std::array<std::pair<std::string_view, DType>, 11> kNames{{
    {"f64", DType::f64},
    {"f32", DType::f32},
    {"bf16", DType::bf16},
    {"e4m3", DType::e4m3},
    {"e5m2", DType::e5m2},
    {"i8", DType::i8},
    {"u8", DType::u8},
    {"u16", DType::u16},
    {"i32", DType::i32},
    {"u32", DType::u32},
    {"i64", DType::i64},
}};
}  // namespace

std::string_view name_of(DType type) {
  for (const auto& [name, value] : kNames)
    if (value == type) return name;
  return "?";
}

std::optional<DType> dtype_named(std::string_view name) {
  for (const auto& [known, value] : kNames)
    if (known == name) return value;
  if (name == "fp32" || name == "float32") return DType::f32;
  if (name == "fp64" || name == "float64") return DType::f64;
  if (name == "bfloat16") return DType::bf16;
  if (name == "int8") return DType::i8;
  return std::nullopt;
}

}  // namespace quern
