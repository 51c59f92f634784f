#include "bench/peaks.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "base/median.h"
#include "bench/random_product.h"

namespace quern::bench {

namespace {

constexpr std::size_t kSamples = 11;

}  // namespace

double median_seconds(Device& device, const std::function<void()>& run, std::size_t samples) {
  Stream stream = device.stream(StreamKind::compute);
  std::vector<Event> events;
  for (std::size_t i = 0; i <= samples; ++i) events.push_back(device.make_event());
  for (int i = 0; i < 3; ++i) run();  // clocks rise
  device.record(events[0], stream);
  for (std::size_t i = 1; i <= samples; ++i) {
    run();
    device.record(events[i], stream);
  }
  device.synchronize(stream);
  std::vector<double> times;
  for (std::size_t i = 1; i <= samples; ++i) times.push_back(device.elapsed(events[i - 1], events[i]) / 1e3);
  return median_of(std::move(times));
}

double measure_memory_rate(Device& device) {
  // An eighth of the device's memory, of four GiB at most: short copies do not reach the full rate.
  const std::size_t most = std::size_t{device.traits().host_addressable ? 256u : 4096u} << 20;
  const std::size_t part = device.traits().memory_bytes / 8;
  const std::size_t bytes = (part > 0 ? std::min(part, most) : most) / 4096 * 4096;
  DeviceMemory from(device, MemoryKind::device, bytes), to(device, MemoryKind::device, bytes);
  Stream stream = device.stream(StreamKind::compute);
  device.fill(from.data(), 0, bytes, stream);
  const double copied = 2.0 * static_cast<double>(bytes) /
                        median_seconds(
                            device, [&] { device.copy(to.data(), from.data(), bytes, stream); }, kSamples);
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
  const double added = 1.5 * static_cast<double>(bytes) /
                       median_seconds(
                           device,
                           [&] {
                             kernel->launch(inputs, outputs, {stream, nullptr});
                           },
                           kSamples);
  return std::max(copied, added);
}

Peaks measure_peaks(Device& device) {
  Peaks peaks;
  peaks.memory_rate = measure_memory_rate(device);
  for (const auto& [format, rated] : device.traits().matmul_rates) {
    const ProductForm form = large_product(device, format);
    const OpInstance op = product_op(form);
    if (const std::string refusal = device.query(op).refusal; !refusal.empty()) {
      peaks.left_out.emplace_back(format, refusal);
      continue;
    }
    RandomProduct product(device, op);
    const double seconds = median_seconds(
        device, [&] { product.launch(); }, kSamples);
    peaks.matmul_rates.emplace_back(format, form.flops() / seconds);
  }
  return peaks;
}

DeviceTraits with_measured(DeviceTraits rated, const Peaks& peaks) {
  rated.memory_rate = peaks.memory_rate;
  rated.matmul_rates = peaks.matmul_rates;
  return rated;
}

}  // namespace quern::bench
