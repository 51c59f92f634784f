#pragma once
// How long a whole step takes, as simulated, and how much of that the kernels wait for transfers.

#include <cstdint>
#include <map>

#include "plan/plan.h"

namespace quern {

/// Seconds.
struct StepTime {
  double total = 0;
  /// In which the compute lane waits for what stores have, by whose it is: the transfers that go on meanwhile.
  std::map<TensorOwner, double> unhidden = {};
};

/// Of a training step of so many micro-batches among other such steps.
StepTime simulated_step(const Plan& plan, const DeviceTraits& device, std::int64_t micro_batches);

}  // namespace quern
