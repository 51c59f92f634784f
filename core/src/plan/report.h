#pragma once
// A plan for people.

#include <string>

#include "base/files/descriptor.h"
#include "plan/plan.h"

namespace quern {

/// Bytes by owner, one a line, with the total.
std::string memory_table(const Plan& plan);

/// A config with the planner's choices, as text.
inline constexpr FileKind kChosenConfigFile{"a config that quern chose", "# Chosen by `quern plan`"};

/// Parameters, memory, what is kept of a layer, work and estimated speed of a step of `accumulation` micro-batches.
std::string plan_report(const Plan& plan, const DeviceTraits& device, std::int64_t accumulation);

}  // namespace quern
