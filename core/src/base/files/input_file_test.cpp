// What other processes may do to a file while it is read, and lists longer than the limit on open files.
#include "base/files/input_file.h"

#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <numeric>

#include <doctest/doctest.h>

#include "base/files/open_files.h"
#include "base/files/test_directory.h"
#include "quern/error.h"
#include "quern/testkit/refusal.h"

using namespace quern;
using testkit::check_refused;
namespace fs = std::filesystem;

namespace {

std::string make_file(const std::string& path, std::size_t size, char first = 0) {
  std::string bytes(size, '\0');
  std::iota(bytes.begin(), bytes.end(), first);
  std::ofstream(path, std::ios::binary) << bytes;
  return bytes;
}

std::string read(const InputFile& file, std::uint64_t offset, std::size_t size) {
  std::string bytes(size, '\0');
  file.read(offset, std::as_writable_bytes(std::span(bytes)));
  return bytes;
}

}  // namespace

TEST_CASE("a file is read at any place, also when another took its name or it lost it") {
  TestDirectory directory;
  const std::string path = directory / "file", bytes = make_file(path, 3000000);
  InputFile file(path);
  for (int i = 0; i < 3; ++i) {
    CHECK(file.size() == bytes.size());
    CHECK(file.text() == bytes);
    CHECK(read(file, 2999990, 10) == bytes.substr(2999990));
    CHECK(read(file, 3000000, 0).empty());
    CHECK_THROWS_AS(read(file, 2999991, 10), Error);
    std::string pieces;
    file.for_each_piece(77, [&](std::span<const std::byte> piece) {
      pieces.append(reinterpret_cast<const char*>(piece.data()), piece.size());
      return pieces.size() < 2000000;
    });
    CHECK(pieces == bytes.substr(77, pieces.size()));
    CHECK(pieces.size() >= 2000000);
    if (i == 0) {
      make_file(path + ".new", 50);
      fs::rename(path + ".new", path);
    } else {
      fs::remove(path);
    }
  }
}

TEST_CASE("a git-lfs pointer in a file's place is called that, whatever the file is for") {
  TestDirectory directory;
  const std::string path = directory / "weights", pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:";
  std::ofstream(path) << pointer << std::string(64, 'a') << "\nsize 988097824\n";
  check_refused(ErrorCode::input, {"weights: a git-lfs pointer, not the file itself; fetch", "git lfs pull"},
                [&] { InputFile file(path); });
  std::ofstream(path) << pointer << std::string(2000, 'a');  // a text about one
  CHECK(InputFile(path).size() > 2000);
}

TEST_CASE("a file that is shortened or extended while it is open ends in an input error with both sizes") {
  TestDirectory directory;
  const std::string path = directory / "file";
  for (std::uintmax_t size : {0, 10, 2999, 3001, 100000}) {
    make_file(path, 3000);
    InputFile file(path);
    fs::resize_file(path, size);
    for (std::uint64_t offset : {0, 2990})
      check_refused(ErrorCode::input,
                    {path + ": changed while it was read: found " + std::to_string(size) + " bytes, expected 3000"},
                    [&] { read(file, offset, 10); });
  }
}

TEST_CASE("what cannot be opened is refused with the system's reason") {
  TestDirectory directory;
  auto refused = [](const std::string& path, const std::string& reason) {
    check_refused(ErrorCode::input, {reason}, [&] { InputFile file(path); });
  };
  refused(directory / "none", "No such file or directory");
  refused(directory.path(), "a directory");
  refused("/dev/zero", "not a regular file");
  refused((directory / "a") + std::string(1, '\0') + "b", "a zero byte in it");
  fs::create_symlink("loop", directory / "loop");
  refused(directory / "loop", "Too many levels of symbolic links");
}

TEST_CASE("more files than may be open are read in any order, and one that is replaced meanwhile is refused") {
  TestDirectory directory;
  std::vector<std::string> paths, contents;
  for (int i = 0; i < 20; ++i) {
    paths.push_back(directory / std::to_string(i));
    contents.push_back(make_file(paths.back(), 100, static_cast<char>(i)));
  }
  OpenFiles files(3);
  auto open_now = [] { return std::distance(fs::directory_iterator("/proc/self/fd"), {}); };
  const auto before = open_now();
  for (int round = 0; round < 3; ++round)
    for (std::size_t i = 0; i < paths.size(); ++i) {
      const std::size_t at = (i * 7 + static_cast<std::size_t>(round)) % paths.size();
      CHECK(files.open(paths[at])->text() == contents[at]);
      CHECK(files.open(paths[at])->text() == contents[at]);
      CHECK(open_now() <= before + 3);
    }
  make_file(paths[5], 200);
  check_refused(ErrorCode::input, {paths[5] + ": replaced or rewritten during the run: found 200 bytes, expected 100"},
                [&] { files.open(paths[5]); });
  auto missing = [&] { files.open(directory / "late"); };
  check_refused(ErrorCode::input, {"No such file"}, missing);
  make_file(directory / "late", 10);
  missing();  // it is there by now
}

TEST_CASE("no descriptor left is a resources error that names the limit") {
  TestDirectory directory;
  make_file(directory / "file", 10);
  // A sanitizer looks at the first error of a type with descriptors of its own.
  check_refused(ErrorCode::resources, {"first"}, [] { throw Error(ErrorCode::resources, {.where = "first"}); });
  rlimit limit{};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &limit) == 0);
  const rlimit none{3, limit.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &none) == 0);
  check_refused(ErrorCode::resources, {"Too many open files", "ulimit -n"},
                [&] { InputFile file(directory / "file"); });
  CHECK(OpenFiles::default_most() == 1);
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &limit) == 0);
}
