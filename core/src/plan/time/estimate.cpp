#include "plan/time/estimate.h"

#include <algorithm>

#include "program/passes/observe.h"

namespace quern {

double matmul_rate(const DeviceTraits& device, DType format) {
  for (const auto& [known, rate] : device.matmul_rates)
    if (known == format) return rate;
  return 0;
}

double cost_seconds(const Cost& cost, const DeviceTraits& device) {
  double rate = cost.tensor_core ? matmul_rate(device, cost.format) : 0;
  if (cost.tensor_core && rate == 0 && !device.matmul_rates.empty()) rate = device.matmul_rates.front().second;
  const double arithmetic = rate > 0 ? cost.flops / rate : 0;
  const double memory = device.memory_rate > 0 ? cost.bytes / device.memory_rate : 0;
  return std::max(arithmetic, memory);
}

double launch_seconds(const OpSupport& support, const Cost& cost, const DeviceTraits& device) {
  return support.seconds > 0 ? support.seconds : cost_seconds(cost, device);
}

double program_seconds(const Program& program, const OpSet& ops, const Geometry& geometry, const Device& device) {
  double seconds = 0;
  const Unobserved rest = without_observations(program);
  for (std::size_t i = 0; i < program.ops.size(); ++i) {
    if (!rest.runs[i]) continue;
    const OpInstance op = instantiate(program, program.ops[i], geometry, rest.read);
    seconds += launch_seconds(device.query(op), cost_of(ops.at(op.kind), op), device.traits());
  }
  return seconds;
}

}  // namespace quern
