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

ProgramEstimate estimate_program(const Program& program, const OpSet& ops, const Geometry& geometry,
                                 const DeviceTraits& device) {
  ProgramEstimate estimate;
  const Unobserved rest = without_observations(program);
  for (std::size_t i = 0; i < program.ops.size(); ++i) {
    if (!rest.runs[i]) continue;
    const Op& op = program.ops[i];
    Cost cost = cost_of(ops.at(op.kind), instantiate(program, op, geometry, rest.read));
    double rate = cost.tensor_core ? matmul_rate(device, cost.format) : 0;
    double arithmetic = rate > 0 ? cost.flops / rate : 0;
    double memory = device.memory_rate > 0 ? cost.bytes / device.memory_rate : 0;
    if (cost.tensor_core && op.phase != Phase::recompute) estimate.flops += cost.flops;
    estimate.seconds += std::max(arithmetic, memory);
  }
  return estimate;
}

}  // namespace quern
