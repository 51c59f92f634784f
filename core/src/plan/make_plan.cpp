// Chooses what to recompute: the policy of the options, or within a byte budget as little as fits.
#include <algorithm>

#include "log/format.h"
#include "plan/estimate.h"
#include "plan/planner.h"
#include "quern/error.h"

namespace quern {

namespace {

std::vector<std::set<std::string>> path_for(const PlanParts& parts, const PlanOptions& options) {
  ProgramSet probe(parts, options);
  auto bytes = [&](const Value& value) {
    return static_cast<double>(byte_count(extents_at(value.shape, options.geometry.tokens()), value.dtype));
  };
  auto seconds = [&](const Program& program) {
    return estimate_program(probe.fused(program), probe.ops(), options.geometry, parts.device.traits()).seconds;
  };
  return recompute_path(probe.typical().lowered.joint, probe.ops(), bytes, seconds);
}

// Programs that keep less also need more transient memory, so what fits is found by laying plans out. All layers get
// the step of the path that fits them all, and as many as there is room for the next one.
Plan plan_within(const PlanParts& parts, const PlanOptions& options, std::int64_t limit) {
  std::vector<std::set<std::string>> path = path_for(parts, options);
  std::size_t step = path.size();
  Plan plan;
  do {
    --step;
    plan = plan_with(parts, options, {.recomputed = path[step]});
  } while (step > 0 && plan.device_bytes > limit);
  if (plan.device_bytes > limit || step + 1 == path.size()) return plan;
  std::int64_t fit = 0, too_many = plan.model.layers;
  while (too_many - fit > 1) {
    std::int64_t middle = (fit + too_many) / 2;
    Plan trial =
        plan_with(parts, options, {.recomputed = path[step], .fewer = path[step + 1], .richer_layers = middle});
    if (trial.device_bytes > limit) {
      too_many = middle;
    } else {
      fit = middle;
      plan = std::move(trial);
    }
  }
  return plan;
}

}  // namespace

Plan make_plan(const PlanParts& parts, const PlanOptions& options) {
  check_placement(options.state);
  if (parts.model.traits().layers < 1)
    throw Error(ErrorCode::config, {.where = "model",
                                    .what = "number of layers",
                                    .found = std::to_string(parts.model.traits().layers),
                                    .expected = "at least 1"});
  Plan plan = plan_with(parts, options, {.recomputed = ProgramSet(parts, options).recomputed(options.recompute)});

  std::int64_t memory = static_cast<std::int64_t>(parts.device.traits().memory_bytes);
  const bool budgeted = options.device_budget > 0 && (memory == 0 || options.device_budget <= memory);
  std::int64_t limit = budgeted ? options.device_budget : memory;
  if (options.device_budget > 0 && options.train && plan.device_bytes > limit)
    plan = plan_within(parts, options, limit);
  if (limit == 0 || plan.device_bytes <= limit) return plan;
  auto sized = [](std::int64_t bytes) { return format_bytes(static_cast<double>(bytes)); };
  OwnerBytes largest;
  for (const OwnerBytes& owner : plan.owners)
    if (owner.memory == MemoryKind::device && owner.bytes > largest.bytes) largest = owner;
  throw Error(ErrorCode::resources,
              {.where = budgeted ? "memory.device_budget" : "device " + parts.device.traits().id,
               .what = "the run does not fit",
               .found = sized(plan.device_bytes) + " needed, of which " + sized(largest.bytes) + " " + largest.owner,
               .expected = "at most " + sized(limit) + ", which is " + sized(plan.device_bytes - limit) + " less",
               .next = "lower train.micro_batch, add to memory.recompute, or take lower-precision optimizer state"});
}

}  // namespace quern
