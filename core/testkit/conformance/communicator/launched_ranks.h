#pragma once
// Ranks that a launcher such as mpirun has to start, for a kit that forks them.

#include <optional>

#include "base/files/test_directory.h"
#include "conformance/subject.h"
#include "launch/mpirun_places.h"

namespace quern::conformance {

/// A folder in which the ranks of a group meet; while it lives, the launcher that the communicator needs has as many
/// places for them.
class RankDirectory : public TestDirectory {
 public:
  /// Skips the contract when the launcher is not here.
  RankDirectory(const Subject& subject, int size);

 private:
  std::optional<MpirunPlaces> places_;
};

/// In a forked rank: takes the environment of its place, if a launcher made one in the folder.
void take_place(const std::string& folder, int rank);

}  // namespace quern::conformance
