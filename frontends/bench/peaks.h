#pragma once
// What a device does at best, measured through its own interface: the rate of its memory, and of a large matmul
// in each format. Ratios to these say what a kernel loses; ratios to a maker's figures also hold what the clocks lose.

#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "quern/device.h"

namespace quern::bench {

struct Peaks {
  double memory_rate = 0;                               ///< bytes/s, read + write: see measure_memory_rate
  std::vector<std::pair<DType, double>> matmul_rates;   ///< FLOP/s by operand format
  std::vector<std::pair<DType, std::string>> left_out;  ///< formats of the rated table not measured, and why
};

/// Seconds of one `run`, which enqueues on the compute stream: the median of `samples`. `device` is open.
double median_seconds(Device& device, const std::function<void()>& run, std::size_t samples);
/// The best of a copy and an addition over buffers far larger than any cache. `device` is open.
double measure_memory_rate(Device& device);
/// Median over random data of 8192 x 8192 matrices (512 where the host computes), y in bf16 (f32 of f32 operands).
/// Takes 8 GiB of device memory for a while, less on small devices.
Peaks measure_peaks(Device& device);
/// `rated` with the rates that were measured instead; a format that was left out has none.
DeviceTraits with_measured(DeviceTraits rated, const Peaks& peaks);

}  // namespace quern::bench
