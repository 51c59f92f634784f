#pragma once
// What communicators need to find each other, from a group of hosts.

#include <optional>
#include <string>

#include "launch/rank_folder.h"
#include "launch/rendezvous/host_group.h"
#include "quern/communicator.h"

namespace quern {

class RankRendezvous {
 public:
  /// Collective. When all ranks are on this machine, rank 0 makes a folder, which goes with this. `group` outlives this
  /// and what get() returns.
  explicit RankRendezvous(HostGroup& group);

  /// For the communicator with this id; each has an address of its own.
  Rendezvous get(const std::string& communicator) const;

 private:
  HostGroup& group_;
  std::optional<RankFolder> own_;  // rank 0's
  std::string folder_;             // its path; empty: several machines
};

}  // namespace quern
