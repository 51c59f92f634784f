#include "launch/numa.h"

#include <doctest/doctest.h>
#include <sched.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "base/files/test_directory.h"

using namespace quern;

TEST_CASE("a thread is kept on the processors of a node") {
  const TestDirectory directory;
  for (const char* node : {"node0", "node1"}) std::filesystem::create_directory(directory / node);
  cpu_set_t allowed;
  REQUIRE(::sched_getaffinity(0, sizeof allowed, &allowed) == 0);
  int first = 0;
  while (!CPU_ISSET(first, &allowed)) ++first;
  std::ofstream(directory / "node0/cpulist") << "1000-1003,1010\n";
  std::ofstream(directory / "node1/cpulist") << "1000," << first << "-" << first << "\n";
  std::thread([&] {  // the affinity is the thread's
    CHECK(!pin_to_numa_node(-1, directory.path()));
    CHECK(!pin_to_numa_node(0, directory.path()));  // none of its processors is ours
    CHECK(!pin_to_numa_node(2, directory.path()));
    cpu_set_t now;
    ::sched_getaffinity(0, sizeof now, &now);
    CHECK(CPU_EQUAL(&now, &allowed));
    CHECK(pin_to_numa_node(1, directory.path()));
    ::sched_getaffinity(0, sizeof now, &now);
    CHECK(CPU_COUNT(&now) == 1);
    CHECK(CPU_ISSET(first, &now));
  })
      .join();
}
