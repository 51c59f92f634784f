#include "launch/mpirun_places.h"

#include <doctest/doctest.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "base/files/test_directory.h"
#include "launch/supervisor.h"
#include "quern/error.h"

using namespace quern;

namespace {

/// A program of that name and with that script instead of the installed one; "": none.
struct Path {
  explicit Path(const std::string& script) {
    ::setenv("PATH", (directory.path() + (script.empty() ? "" : ":" + before)).c_str(), 1);
    if (script.empty()) return;
    std::ofstream(directory / "mpirun") << "#!/bin/sh\n" << script;
    std::filesystem::permissions(directory / "mpirun", std::filesystem::perms::owner_all);
  }
  ~Path() { ::setenv("PATH", before.c_str(), 1); }
  const TestDirectory directory;
  const std::string before = std::getenv("PATH");
};

}  // namespace

TEST_CASE("mpirun is missed, or says why it starts nothing") {
  const TestDirectory folder;
  {
    const Path none("");
    CHECK_THROWS_WITH(MpirunPlaces(folder.path(), 2), doctest::Contains("no mpirun in PATH"));
  }
  const TestDirectory other;
  const Path refuses("echo no slots >&2; exit 1\n");
  CHECK_THROWS_WITH(MpirunPlaces(other.path(), 2), doctest::Contains("no slots"));
}

TEST_CASE("mpirun is ended when a signal comes that stops the run while it starts") {
  const TestDirectory folder;
  const Path slow("echo $$ >\"$FOLDER/process\"; kill -TERM $PPID; exec sleep 60\n");
  ::setenv("FOLDER", folder.path().c_str(), 1);
  pid_t process = 0;
  {
    const WaitingSignals waiting;
    const MpirunPlaces places(folder.path(), 2);
    CHECK(waiting_stop() == SIGTERM);
    std::ifstream(folder / "process") >> process;
    ::signal(SIGTERM, SIG_IGN);  // of this process, from here on
  }
  ::signal(SIGTERM, SIG_DFL);
  REQUIRE(process > 0);
  CHECK(::kill(process, 0) != 0);
}

TEST_CASE("each rank has the environment of its place, which is held as long as the places") {
  const TestDirectory folder;
  // The words of the process follow `sh`; this one is mpirun enough to start two of them.
  const Path two(
      "while [ \"$1\" != sh ]; do shift; done\n"
      "for rank in 0 1; do OMPI_COMM_WORLD_RANK=$rank \"$@\" & done; wait; echo >\"$4/ended\"\n");
  {
    const MpirunPlaces places(folder.path(), 2);
    for (const std::string rank : {"0", "1"}) {
      bool found = false;
      for (const auto& [name, value] : mpirun_place(folder.path(), std::stoi(rank)))
        found = found || (name == "OMPI_COMM_WORLD_RANK" && value == rank);
      CHECK(found);
    }
    CHECK_FALSE(std::filesystem::exists(folder / "ended"));
  }
  CHECK(std::filesystem::exists(folder / "ended"));
}
