#pragma once
// A tensor as a safetensors file describes it. Files know more types than quern computes in.

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "quern/dtype.h"
#include "quern/shape.h"

namespace quern {

/// The types of the safetensors format that quern reads; spelled there as name_of says.
enum class StoredType : std::uint8_t {
  f64,
  f32,
  f16,
  bf16,
  f8_e4m3,
  f8_e5m2,
  i64,
  i32,
  i16,
  i8,
  u64,
  u32,
  u16,
  u8,
  boolean
};

std::size_t size_of(StoredType type);
std::string_view name_of(StoredType type);
StoredType stored_type_of(DType type);
/// Types that read_floats takes.
bool is_floating(StoredType type);

struct StoredTensor {
  std::string name;
  StoredType type = StoredType::f32;
  Extents extents;           ///< empty: a scalar
  std::uint64_t offset = 0;  ///< of its first byte in the data section
  std::uint64_t bytes = 0;
  std::int64_t count() const { return element_count(extents); }
};

struct StoredTensors {
  std::vector<StoredTensor> tensors;  ///< in order of offset
  std::map<std::string, std::string> metadata;
};

/// Bytes of a tensor of that shape; empty when they overflow or an extent is negative.
std::optional<std::uint64_t> stored_bytes(StoredType type, const Extents& extents);

/// Reads the JSON header of a file whose data section has `data_bytes`: types known, shapes and sizes agree, and the
/// tensors cover the section without overlap or hole. An input error naming `where` and the tensor otherwise.
StoredTensors parse_safetensors_header(const std::string& where, std::string_view header, std::uint64_t data_bytes);

}  // namespace quern
