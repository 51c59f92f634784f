// Bytes that reach the file and come back: parts of blocks, many transfers at once, a disk that is full, and one
// that loses what it was given.
#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <random>

#include <doctest/doctest.h>

#include "base/files/test_directory.h"
#include "disk_file.h"
#include "quern/error.h"
#include "transfer_queue.h"

using namespace quern;
using namespace quern::disk;
namespace fs = std::filesystem;

namespace {

struct Blocks {
  explicit Blocks(std::size_t count) : memory(static_cast<std::byte*>(std::aligned_alloc(kBlock, count * kBlock))) {
    std::memset(memory, 0x77, count * kBlock);
  }
  ~Blocks() { std::free(memory); }
  Blocks(const Blocks&) = delete;
  Blocks& operator=(const Blocks&) = delete;
  std::byte* memory;
};

/// The open file in `folder`, which has no name there.
int nameless_file(const std::string& folder) {
  for (const auto& entry : fs::directory_iterator("/proc/self/fd")) {
    std::error_code failure;
    if (fs::read_symlink(entry.path(), failure).string().starts_with(folder + "/"))
      return ::open(entry.path().c_str(), O_RDWR | O_CLOEXEC);
  }
  return -1;
}

}  // namespace

TEST_CASE("transfers of any size, at any byte, read what those before them wrote") {
  const TestDirectory folder;
  DiskFile file(folder.path());
  constexpr std::size_t kBlocks = 700, kMost = 300000;
  REQUIRE(file.add(3) == 0);
  const std::size_t base = file.add(kBlocks) * kBlock;
  REQUIRE(base == 3 * kBlock);
  std::vector<std::uint8_t> mirror(kBlocks * kBlock, 0);
  std::mt19937 random(5);
  for (const int threads : {1, 7}) {
    TransferQueue queue(file, threads);
    std::vector<std::unique_ptr<Blocks>> buffers;
    for (int i = 0; i < 6; ++i) buffers.push_back(std::make_unique<Blocks>(kMost / kBlock + 2));
    for (int round = 0; round < 60; ++round) {
      struct Read {
        Transfer transfer;
        std::vector<std::uint8_t> expected;
      };
      std::vector<Read> reads;
      for (const auto& buffer : buffers) {
        const std::size_t most = round % 3 == 0 ? 9000 : kMost;
        const std::size_t begin = random() % (mirror.size() - most), bytes = 1 + random() % most;
        Transfer transfer{.write = random() % 2 == 0, .memory = buffer->memory, .begin = base + begin, .bytes = bytes};
        auto* range = mirror.data() + begin;
        if (transfer.write) {
          std::generate(range, range + bytes, [&] { return static_cast<std::uint8_t>(random()); });
          std::memcpy(buffer->memory + transfer.begin % kBlock, range, bytes);
        } else {
          reads.push_back({transfer, {range, range + bytes}});
        }
        queue.add(transfer);
      }
      queue.wait_for_all();
      REQUIRE(queue.error().value_or("") == "");
      for (const Read& read : reads)
        REQUIRE(std::memcmp(read.transfer.memory + read.transfer.begin % kBlock, read.expected.data(),
                            read.expected.size()) == 0);
    }
  }
}

TEST_CASE("a file system without room refuses before anything is written, and the file goes on") {
  const TestDirectory folder;
  DiskFile file(folder.path());
  struct statvfs system {};
  REQUIRE(::statvfs(folder.path().c_str(), &system) == 0);
  const std::size_t too_many = system.f_blocks * system.f_frsize / kBlock + 1;
  for (const std::size_t blocks : {too_many, ~std::size_t{0} / kBlock}) try {
      file.add(blocks);
      FAIL("taken");
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::resources);
      CHECK(std::string(error.what()).find("offload disk: the state does not fit into " + folder.path()) == 0);
    }
  CHECK(file.add(1) == 0);
  CHECK(fs::is_empty(folder.path()));
}

TEST_CASE("a folder that cannot be written is named") {
  const TestDirectory folder;
  const std::string taken = folder.path() + "/file";
  write_text(taken, "");
  CHECK_THROWS_WITH_AS(DiskFile(taken + "/below"), doctest::Contains("offload disk: no file can be made in "), Error);
}

TEST_CASE("a disk that loses bytes is found when they are read, and ends all transfers") {
  for (const bool shorter : {false, true})
    for (const bool beside : {false, true}) {  // a part of the block that is written, which keeps the rest of it
      CAPTURE(shorter);
      CAPTURE(beside);
      const TestDirectory folder;
      DiskFile file(folder.path());
      file.add(8);
      const int behind = nameless_file(folder.path());
      REQUIRE(behind >= 0);
      TransferQueue queue(file, 2);
      const Blocks blocks(8);
      queue.add({.write = true, .memory = blocks.memory, .begin = 0, .bytes = 8 * kBlock});
      queue.wait_for_all();
      const char wrong = 'x';
      REQUIRE((shorter ? ::ftruncate(behind, 2 * kBlock) == 0 : ::pwrite(behind, &wrong, 1, 5 * kBlock + 17) == 1));
      ::close(behind);
      queue.wait(queue.add({.memory = blocks.memory, .begin = 0, .bytes = kBlock}));
      CHECK(!queue.error());
      queue.add({.write = beside, .memory = blocks.memory, .begin = 5 * kBlock + 100, .bytes = 3});
      queue.wait_for_all();
      const std::string fault = queue.error().value_or("none");
      CHECK(fault.find("offload disk: cannot read 4096 bytes in " + folder.path()) == 0);
      CHECK(fault.find(shorter ? "the file is shorter than it was" : "other bytes than were written") !=
            std::string::npos);
      CHECK(fault.find("goes on from its newest checkpoint") != std::string::npos);
      queue.wait(queue.add({.memory = blocks.memory, .begin = 0, .bytes = kBlock}));  // does nothing, and ends
    }
}
