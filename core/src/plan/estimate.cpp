#include "plan/estimate.h"

#include <algorithm>

#include "program/passes/observe.h"

namespace quern {

namespace {

double matmul_rate(const DeviceTraits& device, DType format) {
  for (const auto& [dtype, rate] : device.matmul_rates)
    if (dtype == format) return rate;
  return device.matmul_rates.empty() ? 0 : device.matmul_rates.front().second;
}

}  // namespace

double cost_seconds(const Cost& cost, const DeviceTraits& device) {
  const double rate = cost.tensor_core ? matmul_rate(device, cost.format) : 0;
  const double arithmetic = rate > 0 ? cost.flops / rate : 0;
  const double memory = device.memory_rate > 0 ? cost.bytes / device.memory_rate : 0;
  return std::max(arithmetic, memory);
}

double program_seconds(const Program& program, const OpSet& ops, const Geometry& geometry, const DeviceTraits& device) {
  double seconds = 0;
  const Unobserved rest = without_observations(program);
  for (std::size_t i = 0; i < program.ops.size(); ++i) {
    const Op& op = program.ops[i];
    if (rest.runs[i])
      seconds += cost_seconds(cost_of(ops.at(op.kind), instantiate(program, op, geometry, rest.read)), device);
  }
  return seconds;
}

}  // namespace quern
