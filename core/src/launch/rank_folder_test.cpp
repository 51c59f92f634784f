#include "launch/rank_folder.h"

#include <doctest/doctest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <string>

#include "base/files/test_directory.h"

using namespace quern;

TEST_CASE("a folder goes with its owner, and one whose owner was killed with the next that is made") {
  const TestDirectory directory;
  const char* const before = std::getenv("TMPDIR");
  const std::optional<std::string> kept = before ? std::optional<std::string>(before) : std::nullopt;
  ::setenv("TMPDIR", directory.path().c_str(), 1);
  {
    const RankFolder folder;
    std::ofstream(folder.path() / "socket") << "?";
    struct stat about {};
    REQUIRE(::stat(folder.path().c_str(), &about) == 0);
    CHECK((about.st_mode & 0777) == 0700);
    const pid_t owner = ::fork();
    if (owner == 0) {
      const RankFolder left;
      std::ofstream(left.path() / "socket") << "?";
      ::raise(SIGKILL);
    }
    ::waitpid(owner, nullptr, 0);
    CHECK(directory.entries() == 2);
    const RankFolder next;
    CHECK(directory.entries() == 2);
    CHECK(std::filesystem::exists(folder.path() / "socket"));
  }
  CHECK(directory.entries() == 0);
  kept ? ::setenv("TMPDIR", kept->c_str(), 1) : ::unsetenv("TMPDIR");
}

TEST_CASE("a folder for temporary files that is not there is named") {
  const char* const before = std::getenv("TMPDIR");
  const std::string kept = before ? before : "";
  const TestDirectory directory;
  std::ofstream(directory / "file") << "x";
  for (const std::string& wrong : {directory / "missing", directory / "file"}) {
    ::setenv("TMPDIR", wrong.c_str(), 1);
    CHECK_THROWS_WITH_AS(RankFolder(),
                         doctest::Contains(("TMPDIR: no folder can be made for the ranks: found \"" + wrong).c_str()),
                         Error);
  }
  before ? ::setenv("TMPDIR", kept.c_str(), 1) : ::unsetenv("TMPDIR");
}
