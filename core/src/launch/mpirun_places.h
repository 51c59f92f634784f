#pragma once
// Places of mpirun on this machine for ranks that others start. mpirun starts processes that do nothing, and each rank
// takes the environment of one. So whoever started the ranks hears how each ends, and mpirun ends none of them.

#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

#include "base/files/descriptor.h"

namespace quern {

/// Variables of a place.
using PlaceEnvironment = std::vector<std::pair<std::string, std::string>>;

class MpirunPlaces {
 public:
  /// Waits until they are there, or a signal waits that stops the run. `folder` exists and outlives this. Throws a
  /// config error when there is no mpirun, a resources error with its words when it does not start its processes.
  MpirunPlaces(std::string folder, int size);
  /// The ranks have ended: mpirun does.
  ~MpirunPlaces() { end(); }
  MpirunPlaces(const MpirunPlaces&) = delete;
  MpirunPlaces& operator=(const MpirunPlaces&) = delete;

  /// Ends mpirun, when the ranks have, and returns what it printed last: MPI's messages in ranks are among that.
  std::string last_lines();

 private:
  void end() noexcept;

  const std::string folder_;
  OwnedDescriptor output_;  // of mpirun
  OwnedDescriptor hold_;    // the places' processes end when nobody has it open
  pid_t mpirun_ = -1;
  bool there_ = false;  // all places
};

/// Of the place that MpirunPlaces made in the folder for this rank; empty: none.
PlaceEnvironment mpirun_place(const std::string& folder, int rank);

}  // namespace quern
