// What the conformance kit does not ask of every communicator: where and how ranks meet, and calls that differ.
#include "memcpy_communicator.h"

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <thread>

#include <doctest/doctest.h>

#include "base/test_directory.h"
#include "quern/error.h"

using namespace quern;
using namespace quern::memcpy;

namespace {

struct Folder : TestDirectory {
  Rendezvous rank(int rank, int size, double timeout) const {
    return {.rank = rank, .size = size, .address = "file:" + *this / "meeting", .timeout = timeout};
  }
};

std::string fault_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

/// The ranks of a group as threads of this process; what each threw, by rank.
std::vector<std::string> faults(int size, const std::function<void(int)>& work) {
  std::vector<std::string> found(static_cast<std::size_t>(size));
  std::vector<std::jthread> ranks;
  for (int rank = 0; rank < size; ++rank)
    ranks.emplace_back([&, rank] { found[static_cast<std::size_t>(rank)] = fault_of([&] { work(rank); }); });
  ranks.clear();
  return found;
}

bool has(const std::string& text, const std::string& part) {
  CAPTURE(text);
  CAPTURE(part);
  CHECK(text.find(part) != std::string::npos);
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("ranks meet, exchange messages with descriptors, and leave nothing behind") {
  const Folder folder;
  const auto found = faults(4, [&](int rank) {
    Meeting meeting(folder.rank(rank, 4, 20));
    for (int round = 0; round < 20; ++round) {
      const std::string own = std::to_string(rank) + std::string(1, '\0') + std::to_string(round);
      int ends[2];
      if (::pipe(ends) != 0 || ::write(ends[1], &rank, sizeof rank) != sizeof rank) throw Error({}, {.what = "pipe"});
      const Descriptor in(ends[1]);
      std::vector<Message> all = meeting.exchange({.bytes = own, .descriptor = Descriptor(ends[0])});
      for (int peer = 0; peer < 4; ++peer) {
        int got = -1;
        const Message& message = all[static_cast<std::size_t>(peer)];
        if (message.bytes != std::to_string(peer) + std::string(1, '\0') + std::to_string(round))
          throw Error({}, {.what = "another message"});
        if (peer == rank && (::read(message.descriptor.get(), &got, sizeof got) != sizeof got || got != peer))
          throw Error({}, {.what = "another descriptor"});
        meeting.exchange({});
      }
    }
  });
  CHECK(found == std::vector<std::string>(4));
  CHECK(folder.entries() == 0);
}

TEST_CASE("addresses and folders that cannot be used are refused") {
  const Folder folder;
  auto refusal = [](Rendezvous rendezvous) { return fault_of([&] { const Meeting meeting(rendezvous); }); };
  Rendezvous rendezvous = folder.rank(0, 2, 0.1);
  rendezvous.address = "tcp:localhost:4000";
  has(refusal(rendezvous), "found tcp:localhost:4000, expected file:/FOLDER/NAME");
  rendezvous.address = "file:relative/name";
  has(refusal(rendezvous), "found file:relative/name");
  rendezvous.address = "file:/no/such/folder/name";
  has(refusal(rendezvous), "no folder to meet in");
  for (const mode_t mode : {0750, 0701, 0777}) {
    ::chmod(folder.path().c_str(), mode);
    has(refusal(folder.rank(0, 2, 0.1)), "others can enter");
    has(refusal(folder.rank(1, 2, 0.1)), "others can enter");
  }
  ::chmod(folder.path().c_str(), 0700);
  std::ofstream(folder / "meeting") << "of a run that died";
  has(refusal(folder.rank(0, 2, 0.1)), "it, or take another name");
}

TEST_CASE("ranks that do not come, and groups of two sizes or with a rank twice, are named on every rank") {
  {
    const Folder folder;
    const auto found = faults(2, [&](int rank) { const Meeting meeting(folder.rank(rank, 4, 0.3)); });
    for (const std::string& text : found) has(text, "of 4 ranks, these did not come within 0.3 s: 2, 3");
  }
  {
    const Folder folder;
    has(fault_of([&] { const Meeting meeting(folder.rank(1, 2, 0.2)); }), "rank 0 did not come within 0.2 s");
  }
  {
    const Folder folder;
    const auto found = faults(2, [&](int rank) { const Meeting meeting(folder.rank(rank, 2 + rank, 5)); });
    for (const std::string& text : found) has(text, "a rank does not fit the group of 2: it says that it is 1 3");
  }
  {
    const Folder folder;
    const auto found = faults(3, [&](int rank) { const Meeting meeting(folder.rank(rank > 0 ? 1 : 0, 3, 5)); });
    for (const std::string& text : found) has(text, "it says that it is 1 3");
  }
}

TEST_CASE("calls and messages that differ are a fault of both ranks, with what each does") {
  const Folder folder;
  auto group = [&](const std::function<void(Board&, int)>& work) {
    std::vector<std::string> found(2);
    faults(2, [&](int rank) {
      const Rendezvous rendezvous = folder.rank(rank, 2, 20);
      Meeting meeting(rendezvous);
      {
        Board board(meeting, rendezvous);
        work(board, rank);
        found[static_cast<std::size_t>(rank)] = board.fault().value_or("");
      }
      fault_of([&] { meeting.exchange({}); });
    });
    return found;
  };
  auto call = [](std::uint64_t elements, std::uint64_t offset) {
    return Call{.kind = Call::Kind::all_gather,
                .dtype = static_cast<std::uint32_t>(DType::f32),
                .detail = 0,
                .elements = elements,
                .counts = 0,
                .buffer = 1,
                .offset = offset};
  };
  CHECK(group([&](Board& board, int) { board.meet(call(8, 0)), board.meet({}); }) == std::vector<std::string>(2));
  for (const std::string& text :
       group([&](Board&board, int rank) { board.meet(call(rank == 0 ? 8 : 9, 0)), board.meet({}); }))
    has(text, " does not do the same: found all_gather of ");
  for (const std::string& text :
       group([&](Board&board, int rank) { board.meet(call(8, rank == 0 ? 0 : 4)), board.meet({}); }))
    has(text, "with other counts or places");
  for (const std::string& text :
       group([&](Board&board, int rank) { rank == 0 ? board.give(1, 40) : board.expect(0, 44); }))
    has(text, "rank 0 sends another size: found 40 bytes, where rank 1 receives 44");
  const auto left = group([&](Board& board, int rank) {
    if (rank == 0) board.meet(call(8, 0));
  });
  has(left[0], "rank 1 left the group");
}
