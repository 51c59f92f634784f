#pragma once
// Where each kind of a run's state is kept and over what it is split: chosen by the config, carried to the planner.
// The planner lays out one rank with everything on the device; what it cannot lay out is refused here, by key.

#include <cstdint>
#include <string>
#include <string_view>

namespace quern {

/// ranks: every rank keeps a slab.
enum class Sharding : std::uint8_t { none, ranks };
std::string_view name_of(Sharding sharding);

inline constexpr std::string_view kOnDevice = "device";

/// Of one kind of state, in all parameter groups.
struct Placement {
  std::string memory{kOnDevice};  ///< or the id of an offload store
  Sharding sharding = Sharding::none;
};

struct StatePlacement {
  int ranks = 1;
  Placement master, moments;  ///< sharded alike: one rank updates both
  Placement gradients, weights;
  Placement activations;  ///< saved for the backward pass; never sharded
};

/// Throws a config error with a line for each key that asks for more than one rank, a shard or another memory.
void check_placement(const StatePlacement& state);

}  // namespace quern
