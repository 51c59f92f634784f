#include "base/files/descriptor.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <thread>

#include <doctest/doctest.h>

#include "base/files/test_directory.h"
#include "quern/error.h"
#include "quern/testkit/refusal.h"

using namespace quern;
namespace fs = std::filesystem;

namespace {

constexpr FileKind kKind{"a table of quern", "{\"table\":"};

void check_refused(const std::string& path, const char* found) {
  CAPTURE(path);
  const Error error = testkit::error_of([&] { check_own_file(path, kKind, "choose another"); });
  CHECK(error.code() == ErrorCode::resources);
  CHECK(error.detail().where == path);
  CHECK(error.detail().found == found);
  CHECK(error.detail().next == "choose another");
}

}  // namespace

TEST_CASE("only what begins as its kind does may be overwritten, through links too") {
  TestDirectory directory;
  const std::string path = directory / "file", link = directory / "link";
  fs::create_symlink(path, link);
  auto set = [&](const std::string& text) { std::ofstream(path, std::ios::binary) << text; };
  auto allowed = [&](const std::string& text) {
    set(text);
    for (const std::string& own : {path, link}) CHECK_NOTHROW(check_own_file(own, kKind, ""));
  };
  for (const std::string& absent : {path, link}) CHECK_NOTHROW(check_own_file(absent, kKind, ""));
  for (const char* text : {"", "{\"tab", "{\"table\":", "{\"table\": [1, 2]}\n"}) allowed(text);
  for (const char* text : {"x", "{\"tables\":1}", "QUERNTOK"}) {
    set(text);
    for (const std::string& foreign : {path, link}) check_refused(foreign, "a file that begins differently");
  }
}

TEST_CASE("anything but a regular file is refused without waiting for it") {
  TestDirectory directory;
  const std::string fifo = directory / "fifo";
  REQUIRE(::mkfifo(fifo.c_str(), 0600) == 0);
  check_refused(fifo, "no regular file");
  check_refused(directory.path(), "no regular file");
  check_refused("/dev/null", "no regular file");
}

TEST_CASE("a text is written only where it is taken at once") {
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  ::fcntl(ends[1], F_SETPIPE_SZ, 4096);
  constexpr std::chrono::milliseconds kAtOnce{0};
  CHECK(write_if_taken(ends[1], "text", kAtOnce));
  for (int i = 0; i < 100 && write_if_taken(ends[1], std::string(1000, 'x'), kAtOnce); ++i) {
  }
  CHECK_FALSE(write_if_taken(ends[1], "text", kAtOnce));
  ::close(ends[0]);
  ::close(ends[1]);
}

TEST_CASE("a lock waits for who only looks, and for no other holder") {
  const TestDirectory directory;
  auto open = [&] { return OwnedDescriptor(::open(directory.path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)); };
  const OwnedDescriptor own = open(), other = open();
  OwnedDescriptor looking = open();
  REQUIRE(::flock(looking.get(), LOCK_SH | LOCK_NB) == 0);
  std::thread looks([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    looking.reset();
  });
  CHECK(lock_alone(own.get()) == 0);
  looks.join();
  CHECK(lock_alone(other.get()) == EWOULDBLOCK);
  CHECK(lock_alone(-1) == EBADF);
}
