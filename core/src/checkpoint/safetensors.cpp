#include "checkpoint/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/checksum.h"
#include "base/shorten.h"
#include "checkpoint/half.h"
#include "quern/error.h"
#include "quern/numeric.h"

namespace quern {

static_assert(std::endian::native == std::endian::little, "safetensors files are read without byte swaps");

namespace {

constexpr std::uint64_t kLengthBytes = 8;
constexpr std::uint64_t kLongestHeader = std::uint64_t{100} << 20;  // as in the format

std::string quote_json(const std::string& text) { return nlohmann::json(text).dump(); }

std::string header_text(const std::string& path, const std::vector<TensorDeclaration>& tensors,
                        const std::map<std::string, std::string>& metadata, std::uint64_t& data_bytes) {
  std::string text = "{";
  if (!metadata.empty()) text += "\"__metadata__\":" + nlohmann::json(metadata).dump();
  std::map<std::string, int> names;
  data_bytes = 0;
  for (const TensorDeclaration& tensor : tensors) {
    auto bytes = stored_bytes(tensor.type, tensor.extents);
    if (!bytes || names[tensor.name]++ > 0 || tensor.name == "__metadata__")
      fail_internal(path, "tensor " + quote_name(tensor.name) + " declared badly or twice");
    std::string shape;
    for (std::int64_t extent : tensor.extents) shape.append(shape.empty() ? "" : ",").append(std::to_string(extent));
    text.append(text.size() > 1 ? "," : "").append(quote_json(tensor.name));
    text.append(":{\"dtype\":\"").append(name_of(tensor.type)).append("\",\"shape\":[").append(shape);
    text.append("],\"data_offsets\":[")
        .append(std::to_string(data_bytes) + "," + std::to_string(data_bytes + *bytes))
        .append("]}");
    data_bytes += *bytes;
  }
  text += "}";
  return text.append((8 - text.size() % 8) % 8, ' ');
}

}  // namespace

SafetensorsFile::SafetensorsFile(std::string path) : file_(std::move(path)) {
  auto refuse = [&](const std::string& what, const std::string& found, const std::string& expected) {
    throw Error(ErrorCode::input, {file_.path(), what, found, expected, "download or create the file again"});
  };
  if (file_.size() < kLengthBytes)
    refuse("not a whole safetensors file", std::to_string(file_.size()) + " bytes", "at least 8");
  std::uint64_t length = 0;
  file_.read(0, std::as_writable_bytes(std::span(&length, 1)));
  if (length > kLongestHeader)
    refuse("header length", std::to_string(length) + " bytes", "at most " + std::to_string(kLongestHeader));
  if (length > file_.size() - kLengthBytes)
    refuse("file is truncated", std::to_string(file_.size()) + " bytes",
           "a header of " + std::to_string(length) + " bytes");
  data_at_ = kLengthBytes + length;
  std::string header(length, '\0');
  file_.read(kLengthBytes, std::as_writable_bytes(std::span(header)));
  contents_ = parse_safetensors_header(file_.path(), header, file_.size() - data_at_);
  for (std::size_t i = 0; i < contents_.tensors.size(); ++i) index_.emplace(contents_.tensors[i].name, i);
}

const StoredTensor* SafetensorsFile::find(std::string_view name) const {
  auto found = index_.find(name);
  return found == index_.end() ? nullptr : &contents_.tensors[found->second];
}

const StoredTensor& SafetensorsFile::at(std::string_view name) const {
  const StoredTensor* tensor = find(name);
  if (tensor == nullptr) throw Error(ErrorCode::input, {path(), "no tensor " + quote_name(name), "", "", ""});
  return *tensor;
}

void SafetensorsFile::read(const StoredTensor& tensor, std::uint64_t first, std::span<std::byte> out) const {
  if (first > tensor.bytes || out.size() > tensor.bytes - first)
    fail_internal(path(), "read past the end of tensor " + quote_name(tensor.name));
  file_.read(data_at_ + tensor.offset + first, out);
}

std::vector<std::byte> SafetensorsFile::bytes(const StoredTensor& tensor) const {
  std::vector<std::byte> bytes(tensor.bytes);
  read(tensor, 0, bytes);
  return bytes;
}

std::uint64_t SafetensorsFile::checksum() const {
  Checksum sum;
  file_.for_each_piece(0, [&](std::span<const std::byte> piece) {
    sum.add(piece);
    return true;
  });
  return sum.value();
}

void SafetensorsFile::read_floats(const StoredTensor& tensor, std::int64_t first, std::span<float> out) const {
  if (first < 0 || first > tensor.count() || static_cast<std::int64_t>(out.size()) > tensor.count() - first)
    fail_internal(path(), "read past the end of tensor " + quote_name(tensor.name));
  std::vector<std::byte> piece(std::size_t{1} << 16);
  auto convert = [&]<class Stored>(Stored, auto to_float) {
    constexpr std::size_t kSize = sizeof(Stored);
    for (std::size_t done = 0; done < out.size();) {
      const std::size_t count = std::min(out.size() - done, piece.size() / kSize);
      read(tensor, (static_cast<std::size_t>(first) + done) * kSize, std::span(piece).first(count * kSize));
      for (std::size_t i = 0; i < count; ++i) {
        Stored value;
        std::memcpy(&value, piece.data() + i * kSize, kSize);
        out[done + i] = to_float(value);
      }
      done += count;
    }
  };
  switch (tensor.type) {
    case StoredType::f64: return convert(double{}, [](double value) { return static_cast<float>(value); });
    case StoredType::f32:
      return read(tensor, static_cast<std::size_t>(first) * sizeof(float), std::as_writable_bytes(out));
    case StoredType::f16: return convert(std::uint16_t{}, half_to_float);
    case StoredType::bf16: return convert(std::uint16_t{}, bf16_to_float);
    case StoredType::f8_e4m3: return convert(std::uint8_t{}, e4m3_to_float);
    case StoredType::f8_e5m2: return convert(std::uint8_t{}, e5m2_to_float);
    default: break;
  }
  throw Error(ErrorCode::input, {path(), "tensor " + quote_name(tensor.name) + " does not hold real numbers",
                                 std::string(name_of(tensor.type)), "F32, BF16, F16 or another floating type", ""});
}

std::vector<float> SafetensorsFile::read_floats(std::string_view name) const {
  const StoredTensor& tensor = at(name);
  std::vector<float> values(static_cast<std::size_t>(tensor.count()));
  read_floats(tensor, 0, values);
  return values;
}

SafetensorsWriter::SafetensorsWriter(const std::string& path, const std::vector<TensorDeclaration>& tensors,
                                     const std::map<std::string, std::string>& metadata)
    : path_(path), file_(path) {
  std::string header = header_text(path, tensors, metadata, remaining_);
  std::uint64_t length = header.size();
  file_.write(std::as_bytes(std::span(&length, 1)));
  file_.write(header);
}

void SafetensorsWriter::write(std::span<const std::byte> bytes) {
  if (bytes.size() > remaining_) fail_internal(path_, "more bytes than the declared tensors have");
  remaining_ -= bytes.size();
  file_.write(bytes);
}

FileRecord SafetensorsWriter::finish() {
  if (remaining_ != 0) fail_internal(path_, std::to_string(remaining_) + " bytes of the declared tensors are missing");
  return file_.commit();
}

}  // namespace quern
