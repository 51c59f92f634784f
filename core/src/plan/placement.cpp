#include "plan/placement.h"

#include <bit>

#include "quern/error.h"

namespace quern {

std::string_view name_of(Sharding sharding) { return sharding == Sharding::none ? "none" : "ranks"; }

std::int64_t block_of(const StatePlacement& state) {
  const std::int64_t share = (state.in_tree + state.ranks - 1) / state.ranks;
  return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(share)));
}

std::string placement_faults(const StatePlacement& state) {
  std::string faults;
  auto refuse = [&](const std::string& setting, const char* needs, const std::string& instead) {
    faults += "\n  " + setting + " needs " + needs + "; set it to " + instead;
  };
  auto check_sharding = [&](const char* key, const Placement& placement) {
    if (placement.sharding != Sharding::none)
      refuse(std::string(key) + " = \"ranks\"", "a plan of slabs that ranks gather and reduce", "\"none\"");
  };
  check_sharding("parallel.shard_gradients", state.gradients);
  check_sharding("parallel.shard_weights", state.weights);
  auto check_memory = [&](const char* key, const Placement& placement) {
    if (placement.memory != kOnDevice && placement.memory != kAuto)
      refuse(std::string(key) + " = \"" + placement.memory + "\"", "a plan of transfers to and from an offload store",
             "\"" + std::string(kOnDevice) + "\"");
  };
  // Ranks reach each other's gradients and weights only in the arena.
  if (state.meet || state.in_tree > 0) check_memory("memory.gradients", state.gradients);
  if (state.meet) check_memory("memory.weights", state.weights);
  if (state.meet) check_memory("memory.activations", state.activations);
  return faults;
}

void check_placement(const StatePlacement& state) {
  const std::string faults = placement_faults(state);
  if (!faults.empty()) throw Error(ErrorCode::config, {.where = "plan", .what = "not in this version:" + faults});
}

}  // namespace quern
