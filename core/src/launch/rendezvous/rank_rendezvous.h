#pragma once
// What communicators need to find each other, from a group of hosts.

#include <filesystem>

#include "launch/rendezvous/host_group.h"
#include "quern/communicator.h"

namespace quern {

class RankRendezvous {
 public:
  /// Collective. When all ranks are on this machine, rank 0 makes a folder that only the user can enter. `group`
  /// outlives this and what get() returns.
  explicit RankRendezvous(HostGroup& group);
  /// Removes the folder.
  ~RankRendezvous();
  RankRendezvous(const RankRendezvous&) = delete;
  RankRendezvous& operator=(const RankRendezvous&) = delete;

  /// For the communicator with this id; each has an address of its own.
  Rendezvous get(const std::string& communicator) const;

 private:
  HostGroup& group_;
  std::filesystem::path folder_;  // empty: several machines
};

}  // namespace quern
