#include "checkpoint/stored_tensor.h"

#include <algorithm>
#include <array>
#include <limits>
#include <tuple>

#include "base/files/strict_json.h"
#include "base/shorten.h"
#include "quern/error.h"

namespace quern {

using nlohmann::json;

namespace {

struct TypeInfo {
  StoredType type;
  const char* name;
  std::size_t size;
};
constexpr std::array<TypeInfo, 15> kTypes{{
    {StoredType::f64, "F64", 8},
    {StoredType::f32, "F32", 4},
    {StoredType::f16, "F16", 2},
    {StoredType::bf16, "BF16", 2},
    {StoredType::f8_e4m3, "F8_E4M3", 1},
    {StoredType::f8_e5m2, "F8_E5M2", 1},
    {StoredType::i64, "I64", 8},
    {StoredType::i32, "I32", 4},
    {StoredType::i16, "I16", 2},
    {StoredType::i8, "I8", 1},
    {StoredType::u64, "U64", 8},
    {StoredType::u32, "U32", 4},
    {StoredType::u16, "U16", 2},
    {StoredType::u8, "U8", 1},
    {StoredType::boolean, "BOOL", 1},
}};
constexpr int kHeaderDepth = 3;  // header, tensor, shape
constexpr const char* kMetadata = "__metadata__";

const TypeInfo& info_of(StoredType type) { return kTypes[static_cast<std::size_t>(type)]; }

std::optional<StoredType> stored_type_named(std::string_view name) {
  for (const TypeInfo& info : kTypes)
    if (info.name == name) return info.type;
  return std::nullopt;
}

/// Reads one header; remembers the file for its messages.
class HeaderReader {
 public:
  explicit HeaderReader(const std::string& where) : where_(where) {}

  StoredTensor tensor(const std::string& name, const json& entry) {
    name_ = name;
    if (!entry.is_object()) refuse("entry", entry.type_name(), "an object");
    for (const auto& item : entry.items())
      if (item.key() != "dtype" && item.key() != "shape" && item.key() != "data_offsets")
        refuse("unknown field", quote_name(item.key()), "dtype, shape and data_offsets");
    StoredTensor tensor;
    tensor.name = name;
    const json& type = field(entry, "dtype");
    auto known = type.is_string() ? stored_type_named(type.get_ref<const std::string&>()) : std::nullopt;
    if (!known)
      refuse("dtype", type.is_string() ? quote_name(type.get_ref<const std::string&>()) : type.type_name(),
             all_types());
    tensor.type = *known;
    for (const json& extent : array(entry, "shape"))
      tensor.extents.push_back(static_cast<std::int64_t>(number(extent, "shape")));
    const json& offsets = array(entry, "data_offsets");
    if (offsets.size() != 2) refuse("data_offsets", std::to_string(offsets.size()) + " numbers", "begin and end");
    std::uint64_t begin = number(offsets[0], "data_offsets"), end = number(offsets[1], "data_offsets");
    if (end < begin)
      refuse("data_offsets", std::to_string(begin) + " to " + std::to_string(end), "an end not before the begin");
    auto bytes = stored_bytes(tensor.type, tensor.extents);
    if (!bytes) refuse("shape", to_string(tensor.extents), "a size that fits into 63 bits");
    if (*bytes != end - begin)
      refuse("size does not agree with its shape", std::to_string(end - begin) + " bytes",
             std::to_string(*bytes) + " for " + to_string(tensor.extents) + " " + std::string(name_of(tensor.type)));
    tensor.offset = begin;
    tensor.bytes = *bytes;
    return tensor;
  }

  [[noreturn]] void refuse(const std::string& what, const std::string& found, const std::string& expected) const {
    std::string subject = name_.empty() ? "" : "tensor " + quote_name(name_) + ": ";
    throw Error(ErrorCode::input,
                {where_, subject + what, found, expected, "the file is damaged or was made by a faulty tool"});
  }
  void about(const std::string& name) { name_ = name; }

 private:
  const json& field(const json& entry, const char* key) const {
    auto found = entry.find(key);
    if (found == entry.end()) refuse(key, "nothing", "this field");
    return *found;
  }
  const json& array(const json& entry, const char* key) const {
    const json& value = field(entry, key);
    if (!value.is_array()) refuse(key, value.type_name(), "an array of numbers");
    return value;
  }
  std::uint64_t number(const json& value, const char* key) const {
    constexpr std::uint64_t kLargest = std::numeric_limits<std::int64_t>::max();
    if (!value.is_number_unsigned() || value.get<std::uint64_t>() > kLargest)
      refuse(key, printable(value.dump(-1, ' ', true)), "whole numbers, not negative");
    return value.get<std::uint64_t>();
  }
  static std::string all_types() {
    std::string text = "one of";
    for (const TypeInfo& type : kTypes) text += std::string(" ") + type.name;
    return text;
  }

  const std::string& where_;
  std::string name_;
};

void check_cover(HeaderReader& reader, const std::vector<StoredTensor>& tensors, std::uint64_t data_bytes) {
  std::uint64_t end = 0;
  for (const StoredTensor& tensor : tensors) {
    reader.about(tensor.name);
    if (tensor.offset != end)
      reader.refuse(tensor.offset < end ? "overlaps the tensor before it" : "leaves a hole before it",
                    "offset " + std::to_string(tensor.offset), std::to_string(end));
    if (tensor.bytes > data_bytes - end)
      reader.refuse("ends after the file's end", std::to_string(end + tensor.bytes) + " bytes",
                    "at most " + std::to_string(data_bytes));
    end += tensor.bytes;
  }
  reader.about("");
  if (end != data_bytes)
    reader.refuse("bytes after the last tensor", std::to_string(data_bytes) + " bytes of data", std::to_string(end));
}

}  // namespace

std::size_t size_of(StoredType type) { return info_of(type).size; }
std::string_view name_of(StoredType type) { return info_of(type).name; }

StoredType stored_type_of(DType type) {
  switch (type) {
    case DType::f64: return StoredType::f64;
    case DType::f32: return StoredType::f32;
    case DType::bf16: return StoredType::bf16;
    case DType::e4m3: return StoredType::f8_e4m3;
    case DType::e5m2: return StoredType::f8_e5m2;
    case DType::i8: return StoredType::i8;
    case DType::u8: return StoredType::u8;
    case DType::u16: return StoredType::u16;
    case DType::i32: return StoredType::i32;
    case DType::u32: return StoredType::u32;
    case DType::i64: return StoredType::i64;
  }
  fail_internal("stored_type_of", "unknown dtype");
}

bool is_floating(StoredType type) { return type <= StoredType::f8_e5m2; }

std::optional<std::uint64_t> stored_bytes(StoredType type, const Extents& extents) {
  std::int64_t bytes = static_cast<std::int64_t>(size_of(type));
  for (std::int64_t extent : extents)
    if (extent < 0 || __builtin_mul_overflow(bytes, extent, &bytes)) return std::nullopt;
  return static_cast<std::uint64_t>(bytes);
}

StoredTensors parse_safetensors_header(const std::string& where, std::string_view header, std::uint64_t data_bytes) {
  HeaderReader reader(where);
  if (header.empty() || header.front() != '{') reader.refuse("header", "no JSON object", "'{'");
  json object = parse_strict_json(where, header, kHeaderDepth);
  StoredTensors result;
  for (const auto& item : object.items()) {
    if (item.key() != kMetadata) {
      result.tensors.push_back(reader.tensor(item.key(), item.value()));
      continue;
    }
    reader.about(kMetadata);
    if (!item.value().is_object()) reader.refuse("metadata", item.value().type_name(), "an object of texts");
    for (const auto& entry : item.value().items()) {
      if (!entry.value().is_string()) reader.refuse("metadata", entry.value().type_name(), "texts only");
      result.metadata.emplace(entry.key(), entry.value().get<std::string>());
    }
  }
  // Empty tensors share the offset of what follows them.
  std::sort(result.tensors.begin(), result.tensors.end(), [](const StoredTensor& a, const StoredTensor& b) {
    return std::tie(a.offset, a.bytes, a.name) < std::tie(b.offset, b.bytes, b.name);
  });
  check_cover(reader, result.tensors, data_bytes);
  return result;
}

}  // namespace quern
