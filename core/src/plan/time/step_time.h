#pragma once
// How long a whole step takes, as simulated, and how much of that the kernels wait for transfers.

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "plan/plan.h"
#include "plan/time/simulate.h"

namespace quern {

/// Seconds that launches take which are slow for one reason, and what they would take otherwise.
struct SlowLaunches {
  double seconds = 0, fast_seconds = 0;
};

/// Seconds.
struct StepTime {
  double total = 0;
  /// Time the compute lane waits for store transfers, by owner: the transfers that go on meanwhile,
  /// or what a launch works on in place.
  std::map<TensorOwner, double> unhidden = {};
  std::map<std::string, SlowLaunches> slow = {};  ///< as the device estimates them, by reason (OpSupport::slow)
};

/// Which owner a range of a store belongs to.
class StoreOwners {
 public:
  explicit StoreOwners(const Plan& plan);
  TensorOwner of(const Place& in_store) const;
  /// Of what a get or put moves.
  TensorOwner moved(const RunSchedule& schedule, const Action& transfer) const;

 private:
  std::map<std::pair<std::int32_t, std::int64_t>, TensorOwner> begins_;  // by store and offset
};

/// In which the compute lane waits for what stores have, seconds from the schedule's start, and whose transfer goes on.
struct StoreWait {
  ActionTime time;
  TensorOwner owner;
};
/// Of one of the plan's schedules, whose actions take these times.
std::vector<StoreWait> store_waits(const Plan& plan, const RunSchedule& schedule, const std::vector<ActionTime>& times);

/// Runs of a training step of so many micro-batches among other such steps, in their order, and how often each comes.
std::vector<std::pair<Run, std::int64_t>> runs_of_step(const Plan& plan, std::int64_t micro_batches);
/// Of such a step, of whose runs `times` gives the times of their actions.
StepTime step_time(const Plan& plan, std::int64_t micro_batches,
                   const std::function<std::vector<ActionTime>(Run)>& times);
/// The same, as simulated.
StepTime simulated_step(const Plan& plan, const DeviceTraits& device, std::int64_t micro_batches);

/// "565ms for master weights, 420ms for gradients"; empty: nothing waits.
std::string waits_text(const StepTime& step);
/// A line for each reason: "attention on CUDA cores, ...: 1.30s of a step (61%), otherwise 45ms".
std::vector<std::string> slow_texts(const StepTime& step);

}  // namespace quern
