#include "runtime/shared_memory.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "quern/error.h"

using namespace quern;
using namespace quern::cpu;

TEST_CASE("shared memory keeps address and contents, and what one process writes another one reads") {
  constexpr std::size_t kBytes = (std::size_t{33} << 20) + 512;  // pieces and a rest
  SharedMemory memory;
  auto* own = static_cast<char*>(memory.allocate(kBytes));
  own[0] = 1, own[kBytes - 1] = 2, own[777] = 3;
  SharedHandle handle = memory.share(own + 777);
  const pid_t child = ::fork();
  if (child == 0) {
    SharedMemory other;
    char* mapped = static_cast<char*>(other.import(handle));
    const bool same = mapped[0] == 3 && mapped[-777] == 1 && mapped[kBytes - 1 - 777] == 2;
    mapped[1] = 42;
    ::_exit(same ? 0 : 1);
  }
  int status = -1;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  CHECK((own[0] == 1 && own[777] == 3 && own[778] == 42 && own[kBytes - 1] == 2));
  auto* here = static_cast<char*>(memory.import(handle));
  ::close(handle.descriptor);
  memory.release(own);
  CHECK(here[1] == 42);  // as long as somebody maps it
  memory.release_imported(here);
}

TEST_CASE("what cannot be shared or mapped is a resources error") {
  SharedMemory memory;
  char other = 0;
  CHECK_THROWS_WITH_AS(memory.share(&other), doctest::Contains("not of this device"), Error);
  CHECK_THROWS_WITH_AS(memory.import({.bytes = "short", .descriptor = -1}), doctest::Contains("does not fit"), Error);
  void* block = memory.allocate(1 << 20);
  SharedHandle handle = memory.share(block);
  handle.bytes[7] = 1;  // another size
  CHECK_THROWS_WITH_AS(memory.import(handle), doctest::Contains("does not fit"), Error);
  ::close(handle.descriptor);
  memory.release(block);
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small{.rlim_cur = 4096, .rlim_max = before.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &small);
  block = memory.allocate(1 << 20);
  CHECK_THROWS_WITH_AS(memory.share(block), doctest::Contains("ulimit -f"), Error);
  ::setrlimit(RLIMIT_FSIZE, &before);
  memory.release(block);
}
