#pragma once
// A plan for people.

#include <string>

#include "plan/plan.h"

namespace quern {

/// Bytes by owner, one a line, with the total.
std::string memory_table(const Plan& plan);

/// Bytes of parameter state by kind and parameter group, with its place and what it is split over.
std::string state_table(const Plan& plan);

/// Parameters, memory, what is kept of a layer, work and estimated speed of a step of `accumulation` micro-batches.
std::string plan_report(const Plan& plan, const DeviceTraits& device, std::int64_t accumulation);

}  // namespace quern
