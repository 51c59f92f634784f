// Files appear whole or not at all; failures are resources errors that leave the old content.
#include "base/files/durable_file.h"

#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include <doctest/doctest.h>

#include "base/files/input_file.h"
#include "base/files/test_directory.h"
#include "quern/error.h"
#include "quern/testkit/refusal.h"

using namespace quern;
using testkit::error_of;
namespace fs = std::filesystem;

namespace {

std::string text_of(const std::string& path) { return InputFile(path).text(); }

}  // namespace

TEST_CASE("a durable file replaces the old one only when it is committed") {
  TestDirectory directory;
  std::string path = directory / "a";
  {
    DurableFile file(path);
    file.write("one");
    CHECK(!fs::exists(path));
    file.write("two");
    FileRecord record = file.commit();
    CHECK(record.bytes == 6);
    CHECK(record.checksum == checksum_of(std::as_bytes(std::span(std::string_view("onetwo")))));
  }
  CHECK(text_of(path) == "onetwo");
  {
    DurableFile abandoned(path);
    abandoned.write("three");
  }
  CHECK(text_of(path) == "onetwo");
  CHECK(directory.entries() == 1);
}

TEST_CASE("a failed write names the path and leaves nothing") {
  TestDirectory directory;
  std::string path = directory / "big";
  // A file size limit stands in for a full disk: write() fails in the same place.
  auto old_handler = ::signal(SIGXFSZ, SIG_IGN);
  rlimit old{};
  ::getrlimit(RLIMIT_FSIZE, &old);
  rlimit small{4096, old.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &small);
  const Error error = error_of([&] {
    DurableFile file(path);
    file.write(std::string(10000, 'x'));
    file.commit();
  });
  ::setrlimit(RLIMIT_FSIZE, &old);
  ::signal(SIGXFSZ, old_handler);
  CHECK(error.code() == ErrorCode::resources);
  CHECK(directory.entries() == 0);
  CHECK(error_of([&] { DurableFile file(directory / "no/such/place"); }).code() == ErrorCode::resources);
  if (::geteuid() == 0) {
    MESSAGE("read-only directory not tried: this user may write anywhere");
    return;
  }
  fs::permissions(directory.path(), fs::perms::owner_read | fs::perms::owner_exec);
  CHECK(error_of([&] { DurableFile file(path); }).code() == ErrorCode::resources);
  fs::permissions(directory.path(), fs::perms::owner_all);
}

TEST_CASE("a directory takes the place of an older one") {
  TestDirectory directory;
  for (const char* content : {"first", "second"}) {
    std::string fresh = directory / ".tmp-export";
    make_directories(fresh);
    std::ofstream(fresh + "/file") << content;
    replace_directory(fresh, directory / "export");
    CHECK(text_of(directory / "export/file") == content);
    CHECK(directory.entries() == 1);
  }
}

TEST_CASE("a directory appears whole or not at all, and its faults do not name removed files") {
  TestDirectory directory;
  const std::string path = directory / "new/export";
  auto fill = [](const std::string& text) {
    return [text](const std::string& temporary) { std::ofstream(temporary + "/file") << text; };
  };
  for (const char* content : {"first", "second"}) {
    write_directory(path, fill(content));
    CHECK(text_of(path + "/file") == content);
  }
  CHECK_THROWS_WITH(write_directory(path,
                                    [&](const std::string& temporary) {
                                      fill("third")(temporary);
                                      DurableFile file(temporary + "/no/such");
                                    }),
                    (path + "/no/such: cannot be created: found No such file or directory").c_str());
  CHECK_THROWS_AS(write_directory(path, [](const std::string&) { throw 1; }), int);
  CHECK(text_of(path + "/file") == "second");
  CHECK(std::distance(fs::directory_iterator(directory / "new"), {}) == 1);
}

TEST_CASE("a directory that takes no files is found out, one that does is left as it was") {
  TestDirectory directory;
  check_writable(directory / "a/b");
  CHECK(fs::is_empty(directory / "a/b"));
  std::ofstream(directory / "file").flush();
  CHECK(error_of([&] { check_writable(directory / "file"); }).code() == ErrorCode::resources);
  CHECK_THROWS_WITH(check_writable("/proc/self/fdinfo"),
                    "/proc/self/fdinfo: no file can be written there: found No such file or directory");
}

TEST_CASE("mapping refuses anything but a readable file") {
  TestDirectory directory;
  std::ofstream(directory / "empty").flush();
  CHECK(InputFile(directory / "empty").text().empty());
}
