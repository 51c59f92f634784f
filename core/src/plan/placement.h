#pragma once
// Where each kind of a run's state is kept and over what it is split: chosen by the config, carried to the planner.
// What the planner cannot lay out is refused here, by key.

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
  bool meet = false;          ///< whether there are collectives, also of one rank alone
  int rank = 0;               ///< whose plan it is; those of all ranks have the same order of collectives
  Placement master, moments;  ///< sharded alike: one rank updates both
  Placement gradients, weights;
  Placement activations;  ///< saved for the backward pass; never sharded
};

/// Throws a config error with a line for each key that asks for what no plan has yet.
void check_placement(const StatePlacement& state);

}  // namespace quern
