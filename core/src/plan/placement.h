#pragma once
// Where each kind of a run's state is kept and over what it is split: chosen by the config, carried to the planner.
// What the planner cannot lay out is refused here, by key.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace quern {

/// ranks: every rank keeps a slab.
enum class Sharding : std::uint8_t { none, ranks };
std::string_view name_of(Sharding sharding);

inline constexpr std::string_view kOnDevice = "device";
inline constexpr std::string_view kAuto = "auto";  ///< the planner chooses

/// Of one kind of state, in all parameter groups.
struct Placement {
  std::string memory{kOnDevice};  ///< or the id of an offload store, or until the planner has chosen kAuto
  Sharding sharding = Sharding::none;
  /// 0 to 99, of the layers: their state stays on the device although `memory` is a store.
  std::int64_t device_percent = 0;

  /// Whether the state of that layer is on the device; -1: outside the layers. Those that stay are spread evenly, so
  /// that transfers of the others are spread over a pass. Beside layers that stay so do tensors outside them: a
  /// transfer of several layers' size, at an end of a pass, would be hidden by little.
  bool on_device(int layer) const;
};

/// A placement by its text in a config: "device", "auto", a store's id, or with a share of the layers on the device
/// "device:40%,host"; nothing if it is none of these. Whether there is such a store is not looked at.
std::optional<Placement> placement_named(std::string_view text);
std::string text_of(const Placement& placement);

struct StatePlacement {
  int ranks = 1;      ///< that shard state, if any is
  int machines = 1;   ///< with so many ranks each; every one has all state
  bool meet = false;  ///< whether there are collectives, also of one rank alone
  int rank = 0;       ///< whose plan it is; all ranks' plans have the same order of collectives
  /// Not 0: so many micro-batches of a step are summed in a tree over their number, for equal bits on any number of
  /// ranks. Each rank has a block of them (block_of); sharded, there are 1, 2, 4 or 8 ranks.
  std::int64_t in_tree = 0;
  Placement master, moments;  ///< sharded alike: one rank updates both
  Placement gradients, weights;
  Placement activations;  ///< saved for the backward pass; never sharded
  /// Whether each rank has rows of matrices' masters and optimizer states.
  bool shards() const { return ranks > 1 && master.sharding == Sharding::ranks; }
};

/// Pieces of a matrix whose squares are summed apart where `in_tree`; shards are of whole ones.
inline constexpr int kPieces = 8;

/// Micro-batches of a rank where `in_tree`: a power of two, so that they are a branch of the tree; the last rank may
/// have fewer.
std::int64_t block_of(const StatePlacement& state);

/// What a key places.
struct PlacedKey {
  const char* key;
  Placement StatePlacement::*placement;
};
inline constexpr PlacedKey kPlacedKeys[] = {{"memory.master", &StatePlacement::master},
                                            {"memory.moments", &StatePlacement::moments},
                                            {"memory.gradients", &StatePlacement::gradients},
                                            {"memory.weights", &StatePlacement::weights},
                                            {"memory.activations", &StatePlacement::activations}};

/// A line for each key that asks for what no plan has yet.
std::string placement_faults(const StatePlacement& state);
/// Throws them as a config error.
void check_placement(const StatePlacement& state);

}  // namespace quern
