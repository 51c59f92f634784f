#include "event_file.h"

#include <array>
#include <bit>

namespace quern::tensorboard {

namespace {

constexpr std::array<std::uint32_t, 256> kCrcTable = [] {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = crc & 1 ? crc >> 1 ^ 0x82f63b78u : crc >> 1;
    table[i] = crc;
  }
  return table;
}();

template <class Number>
std::string little_endian(Number number) {
  std::string bytes;
  for (std::size_t i = 0; i < sizeof number; ++i) bytes += static_cast<char>(number >> 8 * i & 0xff);
  return bytes;
}

std::string masked_checksum(std::string_view bytes) {
  std::uint32_t crc = crc32c(bytes);
  return little_endian((crc >> 15 | crc << 17) + 0xa282ead8u);
}

// ---- protobuf's wire format: a field's number and wire type, then its value ----

std::string varint(std::uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes += static_cast<char>((value & 0x7f) | 0x80);
  return bytes + static_cast<char>(value);
}

std::string integer_field(std::uint32_t field, std::int64_t value) {
  return varint(field << 3 | 0) + varint(static_cast<std::uint64_t>(value));
}
std::string double_field(std::uint32_t field, double value) {
  return varint(field << 3 | 1) + little_endian(std::bit_cast<std::uint64_t>(value));
}
std::string bytes_field(std::uint32_t field, std::string_view value) {
  return varint(field << 3 | 2) + varint(value.size()) + std::string(value);
}
std::string float_field(std::uint32_t field, float value) {
  return varint(field << 3 | 5) + little_endian(std::bit_cast<std::uint32_t>(value));
}

// Event: 1 wall_time, 2 step, 3 file_version, 5 summary, 7 session_log. Summary: 1 value. Summary.Value: 1 tag,
// 2 simple_value. SessionLog: 1 status (START is 1).
std::string event(double wall_time, std::int64_t step) { return double_field(1, wall_time) + integer_field(2, step); }

}  // namespace

std::uint32_t crc32c(std::string_view bytes) {
  std::uint32_t crc = ~0u;
  for (char byte : bytes) crc = crc >> 8 ^ kCrcTable[(crc ^ static_cast<unsigned char>(byte)) & 0xff];
  return ~crc;
}

std::string record(std::string_view bytes) {
  std::string length = little_endian(static_cast<std::uint64_t>(bytes.size()));
  return length + masked_checksum(length) + std::string(bytes) + masked_checksum(bytes);
}

std::string version_event(double wall_time) { return double_field(1, wall_time) + bytes_field(3, "brain.Event:2"); }

std::string start_event(double wall_time, std::int64_t step) {
  return event(wall_time, step) + bytes_field(7, integer_field(1, 1));
}

std::string scalars_event(double wall_time, std::int64_t step,
                          const std::vector<std::pair<std::string, float>>& scalars) {
  std::string summary;
  for (const auto& [tag, value] : scalars) summary += bytes_field(1, bytes_field(1, tag) + float_field(2, value));
  return event(wall_time, step) + bytes_field(5, summary);
}

}  // namespace quern::tensorboard
