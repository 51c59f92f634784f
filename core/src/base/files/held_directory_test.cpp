#include "base/files/held_directory.h"

#include <fcntl.h>

#include <filesystem>

#include <doctest/doctest.h>

#include "base/files/durable_file.h"
#include "base/files/test_directory.h"
#include "quern/testkit/refusal.h"

using namespace quern;
namespace fs = std::filesystem;

TEST_CASE("files written into a directory that is moved meanwhile arrive there, and are named so") {
  TestDirectory parent;
  const std::string run = parent / "run", moved = parent / "moved";
  fs::create_directory(run);
  const OwnedDescriptor open(::open(run.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  const HeldDirectory held(open.get(), run);
  auto fill_and_move = [&](const std::string& to, const std::function<void()>& then) {
    return held.write([&](const std::string& directory) {
      write_directory(directory + "/made", [&](const std::string& temporary) {
        DurableFile file(temporary + "/text");
        fs::rename(run, to);
        file.write("abc");
        file.commit();
        then();
      });
      return directory + "/made";
    });
  };
  CHECK(held.write([](const std::string& directory) { return directory + "/none"; }) == run + "/none");
  CHECK(fill_and_move(moved, [] {}) == moved + "/made");
  CHECK(read_text(moved + "/made/text") == "abc");
  CHECK_FALSE(fs::exists(run));
  fs::rename(moved, run);
  testkit::check_refused(ErrorCode::resources, {moved + "/made: no more"}, [&] {
    fill_and_move(moved, [&] { throw Error(ErrorCode::resources, {.where = moved + "/made", .what = "no more"}); });
  });
  testkit::check_refused(ErrorCode::resources, {moved + "/file", "Not a directory"}, [&] {
    held.write([&](const std::string& directory) {
      write_text(moved + "/file", "");
      write_directory(directory + "/file/made", [](const std::string&) {});
      return std::string();
    });
  });
}
