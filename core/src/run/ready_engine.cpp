#include "run/ready_engine.h"

#include <algorithm>
#include <utility>

#include "launch/numa.h"
#include "plan/laws/check_schedules.h"
#include "quern/error.h"

namespace quern {

namespace {

/// A rank with fewer micro-batches than others runs its last one again where all ranks need its shards.
void check_repeats(const Session& session, const Plan& plan) {
  const bool counts = std::any_of(plan.tensors.begin(), plan.tensors.end(),
                                  [](const PlannedTensor& tensor) { return tensor.owner == TensorOwner::statistic; });
  if (!counts || !plan.shards_micro_steps() || session.train.accumulation % session.parallel.ranks == 0) return;
  throw Error(ErrorCode::config,
              {.where = session.config.where("train", "accumulation"),
               .what = "sums of the model's states would have micro-batches twice that ranks run for others' shards",
               .found = std::to_string(session.train.accumulation),
               .expected = "a multiple of " + std::to_string(session.parallel.ranks) + ", parallel.ranks",
               .next = "or set shard_gradients and shard_weights to \"none\""});
}

}  // namespace

// Rank 0 makes choices by timing, for all ranks to compute alike.
std::unique_ptr<Engine> ready_engine(Session& session, Ranks& ranks, const std::string& device_state,
                                     const StartProgress& progress, Phases& phases) {
  progress("opening the device");
  phases.enter("device");
  Device& device = *session.device;
  ranks.open(device, session.device_options.ordinal);
  if (ranks.size() > 1) pin_to_numa_node(device.traits().numa_node);
  if (!device_state.empty()) device.load_state(device_state);
  progress("planning");
  phases.enter("plan");
  PlanOptions options = session.plan_options();
  options.state.rank = ranks.shard();
  options.snapshot = options.snapshot && ranks.leads();
  Plan plan = session.plan(options);
  check_repeats(session, plan);
  ranks.need_same("plan", shared_text(plan));
  progress("preparing kernels");
  phases.enter("kernels");
  std::vector<OffloadStore*> stores = session.open_stores(plan);
  std::unique_ptr<Engine> engine;
  const std::string choices = ranks.from_leader("timing kernels", [&] {
    engine = std::make_unique<Engine>(device, std::move(plan), std::move(stores));
    return device.save_state();
  });
  if (!engine) {
    device.load_state(choices);
    engine = std::make_unique<Engine>(device, std::move(plan), std::move(stores));
  }
  phases.split("memory", engine->spent().memory);
  phases.leave();
  return engine;
}

}  // namespace quern
