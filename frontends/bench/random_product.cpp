#include "bench/random_product.h"

#include <algorithm>
#include <cstdint>

#include "quern/block_scales.h"
#include "quern/error.h"
#include "quern/numeric.h"

namespace quern::bench {

namespace {

constexpr std::size_t kPattern = std::size_t{16} << 20;  // bytes of random numbers that matrices repeat

std::uint64_t next_random(std::uint64_t& state) {
  return state ^= state << 13, state ^= state >> 7, state ^= state << 17;
}

/// Tile scales, in the place of each of 128 rows.
void write_square_scales(std::byte* to, std::size_t bytes) {
  std::uint64_t state = 0x9E3779B97F4A7C15u;
  auto* scales = reinterpret_cast<float*>(to);
  const std::size_t count = bytes / sizeof(float);
  for (std::size_t i = 0; i < count; i += kScaleBlock)
    std::fill_n(scales + i, std::min<std::size_t>(kScaleBlock, count - i), next_random(state) >> 60 > 0 ? 1.0f : 2.0f);
}

/// Uniform in (-1, 1): matmuls of zeros draw less power and run faster than matmuls of data.
void write_pattern(std::byte* to, std::size_t bytes, DType dtype) {
  std::uint64_t state = 0x9E3779B97F4A7C15u;
  for (std::size_t at = 0; at < bytes; at += size_of(dtype)) {
    next_random(state);
    const auto value = static_cast<float>(static_cast<double>(state >> 32) * 0x1p-31 - 1.0);
    switch (dtype) {
      case DType::f32: *reinterpret_cast<float*>(to + at) = value; break;
      case DType::bf16: *reinterpret_cast<std::uint16_t*>(to + at) = float_to_bf16(value); break;
      case DType::e4m3: *reinterpret_cast<std::uint8_t*>(to + at) = float_to_e4m3(value); break;
      case DType::e5m2: *reinterpret_cast<std::uint8_t*>(to + at) = float_to_e5m2(value); break;
      case DType::i8: *reinterpret_cast<std::int8_t*>(to + at) = float_to_i8(127 * value); break;
      default: fail_internal("bench", "no such matmul format");
    }
  }
}

Extents scales_of_a(const ProductForm& form) {
  switch (form.scales) {
    case ProductScales::row: return {form.m};
    case ProductScales::line:
    case ProductScales::square:
    case ProductScales::squares: return row_block_scales(form.m, form.k);
    default: return {1};
  }
}

Extents scales_of_b(const ProductForm& form) {
  switch (form.scales) {
    case ProductScales::row: return {form.n};
    case ProductScales::line: return row_block_scales(form.n, form.k);
    case ProductScales::square:
    case ProductScales::squares: return square_scales(form.n, form.k);
    default: return {1};
  }
}

std::size_t workspace_bytes(const Device& device, const OpInstance& op) {
  return std::max<std::size_t>(device.query(op).workspace_bytes, 256);
}

}  // namespace

OpInstance product_op(const ProductForm& form, bool fast) {
  const bool scaled = form.scales != ProductScales::none;
  const DType other = form.format == DType::e5m2 ? DType::e4m3 : form.format;
  const Extents a = form.transpose_a ? Extents{form.k, form.m} : Extents{form.m, form.k},
                b = form.transpose_b ? Extents{form.n, form.k} : Extents{form.k, form.n};
  OpInstance op;
  op.kind = "matmul";
  op.inputs = {{form.format, a, true, false},
               {other, b, true, false},
               {},
               {DType::f32, scales_of_a(form), scaled, false},
               {DType::f32, scales_of_b(form), scaled, false}};
  op.outputs = {{form.format == DType::f32 ? DType::f32 : DType::bf16, {form.m, form.n}, true, false}};
  op.attributes = {{"transpose_a", std::int64_t{form.transpose_a}}, {"transpose_b", std::int64_t{form.transpose_b}}};
  if (form.scales == ProductScales::line) op.attributes.set("scale_rows_b", std::int64_t{1});
  const bool squares = form.scales == ProductScales::squares;
  if (squares || form.scales == ProductScales::square) op.attributes.set("scale_rows_b", kScaleBlock);
  if (squares) op.attributes.set("square_scales", std::int64_t{1});
  if (fast) op.attributes.set("fast_accumulation", std::int64_t{1});
  return op;
}

ProductForm large_product(const Device& device, DType format) {
  const std::int64_t size = device.traits().host_addressable ? 512 : 8192;
  return {.format = format, .m = size, .n = size, .k = size};
}

RandomProduct::RandomProduct(Device& device, const OpInstance& op)
    : device_(device),
      op_(op),
      kernel_(device.prepare(op_)),
      workspace_(device, MemoryKind::device, workspace_bytes(device, op_)) {
  const Stream stream = device.stream(StreamKind::compute);
  DeviceMemory pattern(device, MemoryKind::pinned, kPattern);
  for (const Operand& operand : op_.inputs) {
    inputs_.push_back(place(operand));
    if (!operand.present) continue;
    const std::size_t bytes = inputs_.back().bytes(), written = std::min(kPattern, bytes);
    if (operand.dtype == DType::f32 && op_.attributes.integer_or("square_scales", 0) != 0)
      write_square_scales(pattern.data(), written);
    else
      write_pattern(pattern.data(), written, operand.dtype);
    for (std::size_t at = 0; at < bytes; at += kPattern)
      device.copy(inputs_.back().as<std::byte>() + at, pattern.data(), std::min(kPattern, bytes - at), stream);
    device.synchronize(stream);  // the pattern is free again
  }
  outputs_.push_back(place(op_.outputs[0]));
}

View RandomProduct::place(const Operand& operand) {
  if (!operand.present) return {};
  const auto bytes = static_cast<std::size_t>(operand.bytes());
  memory_.push_back(std::make_unique<DeviceMemory>(device_, MemoryKind::device, bytes));
  return {memory_.back()->data(), operand.dtype, operand.extents};
}

void RandomProduct::launch() {
  kernel_->launch(inputs_, outputs_, {device_.stream(StreamKind::compute), workspace_.data()});
}

}  // namespace quern::bench
