#pragma once
// What communicators need to find each other, from ranks that can exchange texts.

#include <optional>
#include <string>

#include "launch/rank_folder.h"
#include "quern/communicator.h"

namespace quern {

class RankRendezvous {
 public:
  /// Collective. When all these ranks are on one machine, their first makes a folder, which goes with this.
  explicit RankRendezvous(Rendezvous ranks);

  /// For the communicator with this id; each has an address of its own.
  Rendezvous get(const std::string& communicator) const;

 private:
  Rendezvous ranks_;               // without an address
  std::optional<RankFolder> own_;  // the first rank's
  std::string folder_;             // its path; empty: several machines
};

}  // namespace quern
