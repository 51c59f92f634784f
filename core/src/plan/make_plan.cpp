// Chooses what to recompute: the policy of the options, or within a byte budget as little as fits.
#include <algorithm>
#include <cstdlib>

#include "base/format.h"
#include "plan/check_schedules.h"
#include "plan/estimate.h"
#include "plan/make_schedules.h"
#include "plan/planner.h"
#include "plan/simulate.h"
#include "quern/error.h"

namespace quern {

namespace {

std::vector<std::set<std::string>> path_for(const PlanParts& parts, const PlanOptions& options) {
  ProgramSet probe(parts, options);
  auto bytes = [&](const Value& value) {
    return static_cast<double>(byte_count(extents_at(value.shape, options.geometry.tokens()), value.dtype));
  };
  auto seconds = [&](const Program& program) {
    return program_seconds(probe.fused(program), probe.ops(), options.geometry, parts.device.traits());
  };
  return recompute_path(probe.typical().lowered.joint, probe.ops(), bytes, seconds);
}

struct Chosen {
  RecomputeChoice choice;
  Plan plan;  ///< with it, without schedules
};

// Programs that keep less also need more transient memory, so what fits is found by laying plans out. All layers get
// the step of the path that fits them all, and as many as there is room for the next one.
Chosen within(const PlanParts& parts, const PlanOptions& options, std::int64_t limit) {
  const std::vector<std::set<std::string>> path = path_for(parts, options);
  auto trial = [&](RecomputeChoice choice) {
    Plan plan = plan_with(parts, options, choice);
    return Chosen{std::move(choice), std::move(plan)};
  };
  std::size_t step = path.size() - 1;
  Chosen chosen = trial({.recomputed = path[step]});
  while (step > 0 && chosen.plan.device_bytes > limit) chosen = trial({.recomputed = path[--step]});
  if (chosen.plan.device_bytes > limit || step + 1 == path.size()) return chosen;
  std::int64_t fit = 0, too_many = chosen.plan.model.layers;
  while (too_many - fit > 1) {
    const std::int64_t middle = (fit + too_many) / 2;
    Chosen more = trial({.recomputed = path[step], .fewer = path[step + 1], .richer_layers = middle});
    if (more.plan.device_bytes > limit) {
      too_many = middle;
    } else {
      fit = middle;
      chosen = std::move(more);
    }
  }
  return chosen;
}

/// The least of the budget and the device's memory; 0: neither is known.
std::int64_t limit_of(const PlanParts& parts, const PlanOptions& options) {
  const auto memory = static_cast<std::int64_t>(parts.device.traits().memory_bytes);
  if (options.device_budget <= 0) return memory;
  return memory == 0 ? options.device_budget : std::min(options.device_budget, memory);
}

// What the options name, or within a budget what fits.
Chosen choose(const PlanParts& parts, const PlanOptions& options) {
  Chosen named{.choice = {.recomputed = ProgramSet(parts, options).recomputed(options.recompute)}, .plan = {}};
  named.plan = plan_with(parts, options, named.choice);
  const std::int64_t limit = limit_of(parts, options);
  if (options.device_budget <= 0 || !options.train || named.plan.device_bytes <= limit) return named;
  return within(parts, options, limit);
}

bool verifies() {
#ifdef NDEBUG
  return std::getenv("QUERN_VERIFY_PLANS") != nullptr;  // set for all tests
#else
  return true;
#endif
}

void add_schedules(Plan& plan, const DeviceTraits& device) {
  plan.schedules = make_schedules(plan);
  make_resident(plan.schedules, plan.ring, static_cast<std::int64_t>(device.alignment));
  const RunSchedule& micro_step = plan.schedules[plan.options.train ? Run::later : Run::evaluate];
  plan.seconds_per_micro_step = simulated_seconds(plan.schedules, micro_step, device);
  double flops = 0;
  for (const Action& action : micro_step.actions) {
    if (action.kind != ActionKind::launch) continue;
    const Task& task = plan.schedules.tasks[static_cast<std::size_t>(action.task)];
    if (task.cost.tensor_core && task.phase != Phase::recompute) flops += task.cost.flops;
  }
  plan.flops_per_token = flops / static_cast<double>(plan.options.geometry.tokens());
}

[[noreturn]] void fail(const std::vector<std::string>& faults) {
  std::string list;
  for (const std::string& fault : faults) list += "\n  " + fault;
  fail_internal("plan", "the schedule breaks its laws:" + list);
}

}  // namespace

RecomputeChoice recomputation(const PlanParts& parts, const PlanOptions& options) {
  return choose(parts, options).choice;
}

void verify(const Plan& plan) {
  if (const std::vector<std::string> faults = schedule_faults(plan); !faults.empty()) fail(faults);
}

void verify_all_ranks(const PlanParts& parts, const Plan& plan) {
  verify(plan);
  std::vector<Plan> others;
  std::vector<const ScheduleSet*> ranks;
  others.reserve(static_cast<std::size_t>(plan.options.state.ranks));
  for (int rank = 0; rank < plan.options.state.ranks; ++rank) {
    if (rank == plan.options.state.rank) {
      ranks.push_back(&plan.schedules);
      continue;
    }
    PlanOptions options = plan.options;
    options.state.rank = rank;
    others.push_back(choose(parts, options).plan);
    add_schedules(others.back(), parts.device.traits());
    verify(others.back());
    ranks.push_back(&others.back().schedules);
  }
  for (int run = 0; run < kRuns; ++run)
    if (const std::vector<std::string> faults = rank_faults(ranks, static_cast<Run>(run)); !faults.empty())
      fail(faults);
}

Plan make_plan(const PlanParts& parts, const PlanOptions& options) {
  check_placement(options.state);
  if (parts.model.traits().layers < 1)
    throw Error(ErrorCode::config, {.where = "model",
                                    .what = "number of layers",
                                    .found = std::to_string(parts.model.traits().layers),
                                    .expected = "at least 1"});
  Plan plan = choose(parts, options).plan;
  const std::int64_t limit = limit_of(parts, options);
  const bool budgeted = options.device_budget > 0 && limit == options.device_budget;
  if (limit == 0 || plan.device_bytes <= limit) {
    add_schedules(plan, parts.device.traits());
    if (verifies()) verify_all_ranks(parts, plan);
    return plan;
  }
  auto sized = [](std::int64_t bytes) { return format_bytes(static_cast<double>(bytes)); };
  OwnerBytes largest;
  for (const OwnerBytes& owner : plan.owners)
    if (owner.memory == MemoryKind::device && owner.store < 0 && owner.bytes > largest.bytes) largest = owner;
  throw Error(ErrorCode::resources,
              {.where = budgeted ? "memory.device_budget" : "device " + parts.device.traits().id,
               .what = "the run does not fit",
               .found = sized(plan.device_bytes) + " needed, of which " + sized(largest.bytes) + " " + largest.owner,
               .expected = "at most " + sized(limit) + ", which is " + sized(plan.device_bytes - limit) + " less",
               .next = "lower train.micro_batch, add to memory.recompute, or take lower-precision optimizer state"});
}

}  // namespace quern
