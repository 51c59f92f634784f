#include "bench/large_product.h"

#include <algorithm>
#include <cstdint>

#include "quern/error.h"
#include "quern/numeric.h"

namespace quern {

namespace {

constexpr std::size_t kPattern = std::size_t{16} << 20;  // bytes of random numbers that matrices repeat

/// Uniform in (-1, 1): products of zeros draw less power and run faster than those of data.
void write_pattern(std::byte* to, DType dtype) {
  std::uint64_t state = 0x9E3779B97F4A7C15u;
  for (std::size_t at = 0; at < kPattern; at += size_of(dtype)) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    const auto value = static_cast<float>(static_cast<double>(state >> 32) * 0x1p-31 - 1.0);
    switch (dtype) {
      case DType::f32: *reinterpret_cast<float*>(to + at) = value; break;
      case DType::bf16: *reinterpret_cast<std::uint16_t*>(to + at) = float_to_bf16(value); break;
      case DType::e4m3: *reinterpret_cast<std::uint8_t*>(to + at) = float_to_e4m3(value); break;
      case DType::e5m2: *reinterpret_cast<std::uint8_t*>(to + at) = float_to_e5m2(value); break;
      case DType::i8: *reinterpret_cast<std::int8_t*>(to + at) = float_to_i8(127 * value); break;
      default: fail_internal("peaks", "no such matmul format");
    }
  }
}

OpInstance square_matmul(const Device& device, DType format) {
  const std::int64_t size = device.traits().host_addressable ? 512 : 8192;
  OpInstance op;
  op.kind = "matmul";
  const Extents square{size, size};
  const DType other = format == DType::e5m2 ? DType::e4m3 : format;
  op.inputs = {{format, square, true, false}, {other, square, true, false}, {}, {}, {}};
  op.outputs = {{format == DType::f32 ? DType::f32 : DType::bf16, square, true, false}};
  op.attributes = {{"transpose_a", std::int64_t{0}}, {"transpose_b", std::int64_t{1}}};
  return op;
}

std::size_t workspace_bytes(const Device& device, const OpInstance& op) {
  return std::max<std::size_t>(device.query(op).workspace_bytes, 256);
}

}  // namespace

std::string LargeProduct::refusal(const Device& device, DType format) {
  return device.query(square_matmul(device, format)).refusal;
}

LargeProduct::LargeProduct(Device& device, DType format)
    : device_(device),
      op_(square_matmul(device, format)),
      kernel_(device.prepare(op_)),
      workspace_(device, MemoryKind::device, workspace_bytes(device, op_)) {
  const Stream stream = device.stream(StreamKind::compute);
  DeviceMemory pattern(device, MemoryKind::pinned, kPattern);
  for (const Operand& operand : op_.inputs) {
    inputs_.push_back(place(operand));
    if (!operand.present) continue;
    write_pattern(pattern.data(), operand.dtype);
    const std::size_t bytes = inputs_.back().bytes();
    for (std::size_t at = 0; at < bytes; at += kPattern)
      device.copy(inputs_.back().as<std::byte>() + at, pattern.data(), std::min(kPattern, bytes - at), stream);
    device.synchronize(stream);  // the pattern is free again
  }
  outputs_.push_back(place(op_.outputs[0]));
}

View LargeProduct::place(const Operand& operand) {
  if (!operand.present) return {};
  const auto bytes = static_cast<std::size_t>(operand.bytes());
  memory_.push_back(std::make_unique<DeviceMemory>(device_, MemoryKind::device, bytes));
  return {memory_.back()->data(), operand.dtype, operand.extents};
}

void LargeProduct::launch() {
  kernel_->launch(inputs_, outputs_, {device_.stream(StreamKind::compute), workspace_.data()});
}

double LargeProduct::flops() const {
  const auto size = static_cast<double>(op_.outputs[0].extents[0]);
  return 2 * size * size * size;
}

}  // namespace quern
