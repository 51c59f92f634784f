// What the store asks of the system: how much memory there is, and pages.
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <future>

#include <doctest/doctest.h>

#include "base/files/test_directory.h"
#include "engine/recording_device.h"
#include "shared/pinned_store/available_memory.h"
#include "shared/pinned_store/pinned_pages.h"

using namespace quern;
namespace fs = std::filesystem;

namespace {

/// A system's files, under a folder of their own.
struct System {
  TestDirectory folder;
  const std::string& root = folder.path();
  void write(const std::string& path, const std::string& text) const {
    fs::create_directories(fs::path(root + path).parent_path());
    write_text(root + path, text);
  }
};

}  // namespace

TEST_CASE("memory that is available is the least of the system's and of all control groups'") {
  const System system;
  CHECK_FALSE(available_memory(system.root).has_value());
  system.write("/proc/meminfo", "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable: 4000 kB\n");
  CHECK(available_memory(system.root) == 4000 * 1024);

  SUBCASE("version 2, where an outer group binds") {
    system.write("/proc/self/cgroup", "0::/outer/inner\n");
    system.write("/sys/fs/cgroup/outer/inner/memory.max", "max\n");
    system.write("/sys/fs/cgroup/outer/inner/memory.current", "500\n");
    CHECK(available_memory(system.root) == 4000 * 1024);
    system.write("/sys/fs/cgroup/outer/memory.max", "10000\n");
    system.write("/sys/fs/cgroup/outer/memory.current", "7000\n");
    system.write("/sys/fs/cgroup/outer/memory.stat", "anon 1\nactive_file 5\ninactive_file 1000\n");
    CHECK(available_memory(system.root) == 4000);
    system.write("/sys/fs/cgroup/outer/memory.current", "99999\n");
    CHECK(available_memory(system.root) == 0);
  }
  SUBCASE("version 1, of which a container sees the root alone") {
    system.write("/proc/self/cgroup", "9:cpu:/x\n8:memory:/docker/123\n");
    system.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "2000\n");
    system.write("/sys/fs/cgroup/memory/memory.usage_in_bytes", "300\n");
    CHECK(available_memory(system.root) == 1700);
  }
}

TEST_CASE("this system says how much there is") {
  const auto available = available_memory();
  REQUIRE(available.has_value());
  CHECK(*available > (std::size_t{1} << 20));
}

TEST_CASE("processes of one program, as ranks are, ask for memory and take it one after another") {
  RecordingDevice device;
  const int other = ::open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
  REQUIRE(::flock(other, LOCK_EX) == 0);
  std::future<void> taken =
      std::async(std::launch::async, [&] { PinnedPages(device, "host", MemoryKind::pinned, 1 << 20); });
  CHECK(taken.wait_for(std::chrono::milliseconds(300)) == std::future_status::timeout);
  ::close(other);
  taken.get();
}
