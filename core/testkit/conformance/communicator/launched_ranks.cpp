#include "conformance/communicator/launched_ranks.h"

#include <cstdlib>

#include "conformance/report.h"
#include "quern/communicator.h"
#include "quern/error.h"

namespace quern::conformance {

RankDirectory::RankDirectory(const Subject& subject, int size) {
  const std::string launcher = subject.make<Communicator>()->traits().launcher;
  if (launcher.empty() || size == 1) return;
  if (launcher != "mpirun") throw Skipped{"the kit does not know how to use the launcher " + launcher};
  try {
    places_.emplace(path(), size);
  } catch (const Error& error) {
    throw Skipped{error.what()};
  }
}

void take_place(const std::string& folder, int rank) {
  for (const auto& [name, value] : mpirun_place(folder, rank)) ::setenv(name.c_str(), value.c_str(), 1);
}

}  // namespace quern::conformance
