#include "bench/peaks.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>

#include "quern/error.h"
#include "quern/numeric.h"

namespace quern {

namespace {

constexpr int kSamples = 11;
constexpr std::size_t kPattern = std::size_t{16} << 20;  // bytes of random numbers that matrices repeat

/// Memory of a device, given back.
class Memory {
 public:
  Memory(Device& device, MemoryKind kind, std::size_t bytes)
      : device_(device), kind_(kind), data_(static_cast<std::byte*>(device.allocate(kind, bytes))) {}
  ~Memory() { device_.release(kind_, data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  std::byte* data() const { return data_; }

 private:
  Device& device_;
  MemoryKind kind_;
  std::byte* data_;
};

/// Seconds of one run, the median of several.
double median_seconds(Device& device, const std::function<void()>& run) {
  Stream stream = device.stream(StreamKind::compute);
  std::vector<Event> events;
  for (int i = 0; i <= kSamples; ++i) events.push_back(device.make_event());
  for (int i = 0; i < 3; ++i) run();  // clocks rise
  device.record(events[0], stream);
  for (int i = 1; i <= kSamples; ++i) {
    run();
    device.record(events[static_cast<std::size_t>(i)], stream);
  }
  device.synchronize(stream);
  std::vector<double> times;
  for (std::size_t i = 1; i <= kSamples; ++i) times.push_back(device.elapsed(events[i - 1], events[i]) / 1e3);
  std::nth_element(times.begin(), times.begin() + kSamples / 2, times.end());
  return times[kSamples / 2];
}

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

/// y = a b^T.
OpInstance square_matmul(DType format, std::int64_t size) {
  OpInstance op;
  op.kind = "matmul";
  const Extents square{size, size};
  // Gradients in e5m2 meet e4m3: the product of two e5m2 matrices is nowhere offered.
  const DType other = format == DType::e5m2 ? DType::e4m3 : format;
  op.inputs = {{format, square, true, false}, {other, square, true, false}, {}, {}, {}};
  op.outputs = {{format == DType::f32 ? DType::f32 : DType::bf16, square, true, false}};
  op.attributes = {{"transpose_a", std::int64_t{0}}, {"transpose_b", std::int64_t{1}}};
  return op;
}

double measure_matmul_rate(Device& device, const OpInstance& op, std::size_t workspace_bytes) {
  Stream stream = device.stream(StreamKind::compute);
  std::unique_ptr<Kernel> kernel = device.prepare(op);
  Memory pattern(device, MemoryKind::pinned, kPattern);
  Memory workspace(device, MemoryKind::device, std::max<std::size_t>(workspace_bytes, 256));
  std::vector<std::unique_ptr<Memory>> memory;
  auto place = [&](const Operand& operand) {
    if (!operand.present) return View{};
    memory.push_back(std::make_unique<Memory>(device, MemoryKind::device, static_cast<std::size_t>(operand.bytes())));
    return View{memory.back()->data(), operand.dtype, operand.extents};
  };
  std::vector<View> inputs, outputs;
  for (const Operand& operand : op.inputs) {
    inputs.push_back(place(operand));
    if (!operand.present) continue;
    write_pattern(pattern.data(), operand.dtype);
    const std::size_t bytes = inputs.back().bytes();
    for (std::size_t at = 0; at < bytes; at += kPattern)
      device.copy(inputs.back().as<std::byte>() + at, pattern.data(), std::min(kPattern, bytes - at), stream);
    device.synchronize(stream);  // the pattern is free again
  }
  outputs.push_back(place(op.outputs[0]));
  const double seconds = median_seconds(device, [&] { kernel->launch(inputs, outputs, {stream, workspace.data()}); });
  const auto size = static_cast<double>(op.outputs[0].extents[0]);
  return 2 * size * size * size / seconds;
}

}  // namespace

double measure_memory_rate(Device& device) {
  // An eighth of the device's memory, of four GiB at most: short copies do not reach the full rate.
  const std::size_t most = std::size_t{device.traits().host_addressable ? 256u : 4096u} << 20;
  const std::size_t part = device.traits().memory_bytes / 8;
  const std::size_t bytes = (part > 0 ? std::min(part, most) : most) / 4096 * 4096;
  Memory from(device, MemoryKind::device, bytes), to(device, MemoryKind::device, bytes);
  Stream stream = device.stream(StreamKind::compute);
  device.fill(from.data(), 0, bytes, stream);
  const double copied = 2.0 * static_cast<double>(bytes) /
                        median_seconds(device, [&] { device.copy(to.data(), from.data(), bytes, stream); });
  const Extents extents{static_cast<std::int64_t>(bytes / 8192),
                        2048};  // half of a buffer, twice read and once written
  OpInstance add;
  add.kind = "add";
  add.inputs = {{DType::bf16, extents, true, false}, {DType::bf16, extents, true, false}};
  add.outputs = {{DType::bf16, extents, true, false}};
  if (!device.query(add).refusal.empty()) return copied;
  std::unique_ptr<Kernel> kernel = device.prepare(add);
  const std::vector<View> inputs = {{from.data(), DType::bf16, extents},
                                    {from.data() + bytes / 2, DType::bf16, extents}};
  const std::vector<View> outputs = {{to.data(), DType::bf16, extents}};
  const double added = 1.5 * static_cast<double>(bytes) / median_seconds(device, [&] {
                         kernel->launch(inputs, outputs, {stream, nullptr});
                       });
  return std::max(copied, added);
}

Peaks measure_peaks(Device& device) {
  Peaks peaks;
  peaks.memory_rate = measure_memory_rate(device);
  const std::int64_t size = device.traits().host_addressable ? 512 : 8192;
  for (const auto& [format, rated] : device.traits().matmul_rates) {
    OpInstance op = square_matmul(format, size);
    OpSupport support = device.query(op);
    if (support.refusal.empty())
      peaks.matmul_rates.emplace_back(format, measure_matmul_rate(device, op, support.workspace_bytes));
    else
      peaks.left_out.emplace_back(format, support.refusal);
  }
  return peaks;
}

DeviceTraits with_measured(DeviceTraits rated, const Peaks& peaks) {
  rated.memory_rate = peaks.memory_rate;
  rated.matmul_rates = peaks.matmul_rates;
  return rated;
}

}  // namespace quern
