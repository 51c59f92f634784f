#pragma once
// Ranks that a launcher such as mpirun has to start, for a kit that forks them: the launcher starts processes that do
// nothing, and each rank takes the environment of one.

#include <sys/types.h>

#include "base/files/test_directory.h"
#include "conformance/subject.h"

namespace quern::conformance {

/// A folder in which the ranks of a group meet; while it lives, the launcher that the communicator needs has as many
/// places for them.
class RankDirectory : public TestDirectory {
 public:
  /// Skips the contract when the launcher is not here.
  RankDirectory(const Subject& subject, int size);
  ~RankDirectory();

 private:
  pid_t launcher_ = -1;
};

/// In a forked rank: takes the environment of its place, if a launcher made one in the folder.
void take_place(const std::string& folder, int rank);

}  // namespace quern::conformance
