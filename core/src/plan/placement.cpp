#include "plan/placement.h"

#include <bit>
#include <charconv>

#include "quern/error.h"

namespace quern {

std::string_view name_of(Sharding sharding) { return sharding == Sharding::none ? "none" : "ranks"; }

bool Placement::on_device(int layer) const {
  if (memory == kOnDevice) return true;
  return device_percent > 0 && (layer < 0 || (layer + 1) * device_percent / 100 > layer * device_percent / 100);
}

std::optional<Placement> placement_named(std::string_view text) {
  constexpr std::string_view kShare = "device:", kRest = "%,";
  if (!text.starts_with(kShare)) return Placement{.memory = std::string(text)};
  text.remove_prefix(kShare.size());
  Placement placement;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), placement.device_percent);
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  if (error != std::errc() || placement.device_percent < 1 || placement.device_percent > 99) return {};
  if (!text.starts_with(kRest)) return {};
  placement.memory = text.substr(kRest.size());
  if (placement.memory.empty() || placement.memory == kOnDevice || placement.memory == kAuto) return {};
  return placement;
}

std::string text_of(const Placement& placement) {
  if (placement.device_percent == 0) return placement.memory;
  return "device:" + std::to_string(placement.device_percent) + "%," + placement.memory;
}

std::int64_t block_of(const StatePlacement& state) {
  const std::int64_t share = (state.in_tree + state.ranks - 1) / state.ranks;
  return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(share)));
}

std::string placement_faults(const StatePlacement& state) {
  std::string faults;
  auto refuse = [&](const std::string& setting, const char* needs, const std::string& instead) {
    faults += "\n  " + setting + " needs " + needs + "; set it to " + instead;
  };
  const bool shards = state.master.sharding == Sharding::ranks;
  auto check_sharding = [&](const char* key, const Placement& placement) {
    if (placement.sharding == Sharding::ranks && !shards)
      refuse(std::string(key) + " = \"ranks\"", "parallel.shard_optimizer = \"ranks\"", "\"none\"");
  };
  check_sharding("parallel.shard_gradients", state.gradients);
  check_sharding("parallel.shard_weights", state.weights);
  if (state.in_tree > 0 && state.gradients.sharding == Sharding::ranks)
    refuse("parallel.shard_gradients = \"ranks\"", "sums that are not reproducible on any number of ranks", "\"none\"");
  auto check_memory = [&](const char* key, const Placement& placement, const std::string& needs) {
    if (placement.memory != kOnDevice && placement.memory != kAuto)
      refuse(std::string(key) + " = \"" + placement.memory + "\"", needs.c_str(), "\"" + std::string(kOnDevice) + "\"");
  };
  // Ranks reach each other's whole gradients and weights only in the arena.
  if (state.in_tree > 0)
    check_memory("memory.gradients", state.gradients, "sums that are not reproducible on any number of ranks");
  else if (state.meet && state.gradients.sharding == Sharding::none)
    check_memory("memory.gradients", state.gradients, "parallel.shard_gradients = \"ranks\"");
  if (state.meet && state.weights.sharding == Sharding::none)
    check_memory("memory.weights", state.weights, "parallel.shard_weights = \"ranks\"");
  return faults;
}

void check_placement(const StatePlacement& state) {
  const std::string faults = placement_faults(state);
  if (!faults.empty()) throw Error(ErrorCode::config, {.where = "plan", .what = "not in this version:" + faults});
}

}  // namespace quern
