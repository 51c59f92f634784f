// Beyond the conformance kit: where and how ranks connect, and calls that differ.
#include "memcpy_communicator.h"

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <thread>

#include <doctest/doctest.h>

#include "base/files/test_directory.h"
#include "plugin/plugin_host.h"
#include "quern/error.h"
#include "quern/testkit/forwarding_device.h"
#include "quern/testkit/refusal.h"
#include "test_paths.h"

using namespace quern;
using namespace quern::memcpy;
using testkit::check_holds;

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

std::shared_ptr<Device> cpu(const std::string& streams = "threads") {
  static PluginHost host({std::filesystem::path(QUERN_BUILD_DIR) / "plugins"});  // never unloads what it loaded
  OptionValues options = default_values(host.require("device", "cpu").options);
  options.set("threads", std::int64_t{1});
  options.set("streams", streams);
  std::shared_ptr<Device> device = host.create<Device>("cpu", options);
  device->open(0);
  return device;
}

/// Repeats the enqueued calls, as a graph would: the CPU device cannot capture.
class Tape : public testkit::ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  bool running = false;
  void play() const {
    for (const auto& work : works_) work();
  }

  void copy(void* to, const void* from, std::size_t bytes, Stream stream) override {
    add([=, this] { inner().copy(to, from, bytes, stream); });
  }
  void record(Event event, Stream stream) override {
    add([=, this] { inner().record(event, stream); });
  }
  void wait(Stream stream, Event event) override {
    add([=, this] { inner().wait(stream, event); });
  }
  void write_word(std::uint32_t* word, std::uint32_t value, Stream stream) override {
    add([=, this] { inner().write_word(word, value, stream); });
  }
  void wait_word(const std::uint32_t* word, std::uint32_t mask, Stream stream) override {
    add([=, this] { inner().wait_word(word, mask, stream); });
  }
  void call(std::function<void()>, Stream) override { fail_internal("tape", "work of the host cannot be captured"); }
  std::unique_ptr<Kernel> prepare(const OpInstance& op) override {
    return std::make_unique<Taped>(*this, inner().prepare(op));
  }

 private:
  struct Taped : Kernel {
    Taped(Tape& given, std::unique_ptr<Kernel> inner) : tape(given), kernel(std::move(inner)) {}
    void launch(std::span<const View> in, std::span<const View> out, const Exec& exec) const override {
      tape.add([this, exec, from = std::vector<View>(in.begin(), in.end()),
                to = std::vector<View>(out.begin(), out.end())] { kernel->launch(from, to, exec); });
    }
    Tape& tape;
    std::unique_ptr<Kernel> kernel;
  };
  void add(const std::function<void()>& work) {
    work();
    if (running) works_.push_back(work);
  }

  std::vector<std::function<void()>> works_;
};

/// Maps memory of others, and copies something else from there.
class Lying final : public testkit::ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  void* import_memory(const SharedHandle& handle) override { return imported_ = inner().import_memory(handle); }
  void copy(void* to, const void* from, std::size_t bytes, Stream stream) override {
    inner().copy(to, from, bytes, stream);
    if (from != imported_) return;
    inner().synchronize(stream);
    static_cast<char*>(to)[bytes - 3] ^= 1;
  }

 private:
  void* imported_ = nullptr;
};

/// A device whose memory others cannot map, or that cannot map theirs.
class Apart final : public testkit::ForwardingDevice {
 public:
  Apart(std::shared_ptr<Device> device, bool exports) : ForwardingDevice(std::move(device)), exports_(exports) {}
  SharedHandle export_memory(void* memory) override {
    if (!exports_) refuse();
    return inner().export_memory(memory);
  }
  void* import_memory(const SharedHandle&) override { refuse(); }

 private:
  [[noreturn]] static void refuse() { throw Error(ErrorCode::resources, {.what = "not with this device"}); }
  const bool exports_;
};

}  // namespace

TEST_CASE("a device that copies other bytes from a peer's memory than are there is found before it is used") {
  const Folder folder;
  Lying lying(cpu());
  const std::shared_ptr<Device> sound = cpu();
  for (const std::string through : {"peer", "auto"}) {
    CAPTURE(through);
    std::vector<std::string> warnings(2);
    const auto found = faults(2, [&](int rank) {
      MemcpyCommunicator communicator(MemcpyOptions{.piece_kib = 4, .through = through});
      communicator.connect(folder.rank(rank, 2, 20), rank == 1 ? static_cast<Device&>(lying) : *sound);
      communicator.barrier();
      for (const std::string& warning : communicator.traits().warnings)
        warnings[static_cast<std::size_t>(rank)] += warning;
    });
    for (std::size_t rank = 0; rank < 2; ++rank) {
      CHECK((through == "peer" ? warnings : found)[rank].empty());
      check_holds((through == "peer" ? found : warnings)[rank],
                  {"communicator memcpy", "a copy from the memory of rank 0 to rank 1 has wrong bytes: found ",
                   " in word 1023, expected "});
      if (through == "peer") check_holds(found[rank], {"parallel.memcpy.through = \"host\""});
    }
  }
}

TEST_CASE("where the device memory of ranks cannot be shared or mapped, copies go through host memory") {
  for (const bool exports : {true, false}) {
    const Folder folder;
    std::vector<std::shared_ptr<Device>> devices{cpu(), std::make_shared<Apart>(cpu(), exports), cpu()};
    const auto found = faults(3, [&](int rank) {
      Device& device = *devices[static_cast<std::size_t>(rank)];
      const Stream stream = device.stream(StreamKind::communication);
      constexpr std::int64_t kCount = 5000;
      auto* memory = static_cast<float*>(device.allocate(MemoryKind::device, kCount * sizeof(float)));
      for (std::int64_t i = 0; i < kCount; ++i) memory[i] = static_cast<float>(rank + 1);
      {
        MemcpyCommunicator group({.piece_kib = 1});
        group.connect(folder.rank(rank, 3, 20), device);
        group.register_buffer(memory, kCount * sizeof(float));
        group.all_reduce({memory, DType::f32, {kCount}}, Reduction::sum, stream);
        device.synchronize(stream);
        check_holds(group.traits().warnings.at(0), {"through host memory", "rank 1: not with this device"});
        group.barrier();
      }
      const bool right = std::all_of(memory, memory + kCount, [](float value) { return value == 6; });
      device.release(MemoryKind::device, memory);
      if (!right) throw Error({}, {.what = "another sum"});
    });
    CHECK(found == std::vector<std::string>(3));
  }
}

TEST_CASE("ranks connect, exchange messages with descriptors, and leave nothing behind") {
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
  check_holds(refusal(rendezvous), {"found tcp:localhost:4000, expected file:/FOLDER/NAME"});
  rendezvous.address = "file:relative/name";
  check_holds(refusal(rendezvous), {"found file:relative/name"});
  rendezvous.address = "file:/no/such/folder/name";
  check_holds(refusal(rendezvous), {"no folder for the ranks' sockets"});
  for (const mode_t mode : {0750, 0701, 0777}) {
    ::chmod(folder.path().c_str(), mode);
    check_holds(refusal(folder.rank(0, 2, 0.1)), {"others can enter"});
    check_holds(refusal(folder.rank(1, 2, 0.1)), {"others can enter"});
  }
  ::chmod(folder.path().c_str(), 0700);
  std::ofstream(folder / "meeting") << "of a run that died";
  check_holds(refusal(folder.rank(0, 2, 0.1)), {"it, or take another name"});
}

TEST_CASE("ranks that do not come, and groups of two sizes or with a rank twice, are named on every rank") {
  {
    const Folder folder;
    const auto found = faults(2, [&](int rank) { const Meeting meeting(folder.rank(rank, 4, 0.3)); });
    for (const std::string& text : found) check_holds(text, {"of 4 ranks, these did not connect within 0.3 s: 2, 3"});
  }
  {
    const Folder folder;
    check_holds(fault_of([&] { const Meeting meeting(folder.rank(1, 2, 0.2)); }),
                {"rank 0 did not connect within 0.2 s"});
  }
  {
    const Folder folder;
    const auto found = faults(2, [&](int rank) { const Meeting meeting(folder.rank(rank, 2 + rank, 5)); });
    for (const std::string& text : found)
      check_holds(text, {"a rank does not fit the group of 2: it says that it is 1 3"});
  }
  {
    const Folder folder;
    const auto found = faults(3, [&](int rank) { const Meeting meeting(folder.rank(rank > 0 ? 1 : 0, 3, 5)); });
    for (const std::string& text : found) check_holds(text, {"it says that it is 1 3"});
  }
}

TEST_CASE("calls and messages that differ are a fault of both ranks, with what each does") {
  const Folder folder;
  const std::shared_ptr<Device> devices[] = {cpu(), cpu()};
  auto group = [&](const std::function<void(Board&, int, Stream)>& work) {
    std::vector<std::string> found(2);
    faults(2, [&](int rank) {
      const Rendezvous rendezvous = folder.rank(rank, 2, 20);
      Device& device = *devices[rank];
      const Stream stream = device.stream(StreamKind::communication);
      Meeting meeting(rendezvous);
      {
        Board board(meeting, rendezvous, device);
        work(board, rank, stream);
        device.synchronize(stream);
        meeting.exchange({});
        found[static_cast<std::size_t>(rank)] = board.fault().value_or("");
        meeting.exchange({});
      }
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
  CHECK(group([&](Board& board, int, Stream) { board.compare(call(8, 0)), board.compare(call(9, 0)); }) ==
        std::vector<std::string>(2));
  for (const std::string& text :
       group([&](Board&board, int rank, Stream) { board.compare(call(rank == 0 ? 8 : 9, 0)); }))
    check_holds(text, {" does not do the same: found all_gather of "});
  for (const std::string& text :
       group([&](Board&board, int rank, Stream) { board.compare(call(8, rank == 0 ? 0 : 4)); }))
    check_holds(text, {"with other counts or places"});
  for (const std::string& text :
       group([&](Board&board, int rank, Stream) { board.compare_message(0, 1, rank == 0 ? 40 : 44); }))
    check_holds(text, {" does not do the same: found message of 4"});
  // More calls ahead than are kept: noticed once the other one has come nearly as far.
  for (const std::string& text : group([&](Board&board, int rank, Stream) {
         if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));
         for (std::uint64_t number = 0; number < 5000; ++number) board.compare(call(number == 7 ? rank : 1, 0));
       }))
    check_holds(text, {" did something else than rank "});
}

TEST_CASE("a rank that left is named by the one that waits for it") {
  const Folder folder;
  const std::shared_ptr<Device> devices[] = {cpu(), cpu()};
  std::string found;
  faults(2, [&](int rank) {
    const Rendezvous rendezvous = folder.rank(rank, 2, 20);
    const Stream stream = devices[rank]->stream(StreamKind::communication);
    Meeting meeting(rendezvous);
    Board board(meeting, rendezvous, *devices[rank]);
    if (rank == 1) return;
    board.begin(Call::Kind::all_gather, -1, stream);
    board.give(1, Signal::first, stream);
    board.await(1, Signal::first, stream);
    board.await_taken(1, Signal::first, stream);
    devices[rank]->synchronize(stream);
    found = board.fault().value_or("");
  });
  check_holds(found, {"rank 1 left the group"});
}

TEST_CASE("a sequence of all calls, enqueued once, does the same each time that it is launched") {
  constexpr int kRanks = 3, kLaunches = 40, kParts = 9;
  constexpr std::int64_t kCount = 1000;  // four pieces each
  constexpr std::size_t kBytes = kCount * sizeof(float);
  auto value = [](int launch, int rank, std::int64_t element) {
    return static_cast<float>(launch * 10 + rank + 100 * element);
  };
  /// What the parts of a rank's memory have after a launch.
  auto wanted = [&](int launch, int rank) {
    std::vector<float> want(kParts * kCount);
    for (std::int64_t i = 0; i < kCount; ++i) {
      const float v0 = value(launch, 0, i), v1 = value(launch, 1, i), v2 = value(launch, 2, i);
      const float own = value(launch, rank, i);
      std::int64_t at = i;
      for (const float part : {v1, v0, v1, v2, 3 * (v0 + v1 + v2), own, own, own, rank == 0 ? v2 : 0}) {
        want[static_cast<std::size_t>(at)] = part;
        at += kCount;
      }
    }
    return want;
  };
  for (const auto& [streams, through] : {std::pair("threads", "peer"), std::pair("shuffled", "peer"),
                                         std::pair("threads", "host"), std::pair("shuffled", "host")}) {
    CAPTURE(std::string(streams) + " " + through);
    const Folder folder;
    const std::string way = through;
    std::vector<std::shared_ptr<Device>> devices;
    for (int rank = 0; rank < kRanks; ++rank) devices.push_back(cpu(streams));
    const auto found = faults(kRanks, [&](int rank) {
      Tape tape(devices[static_cast<std::size_t>(rank)]);
      const Stream stream = tape.stream(StreamKind::communication);
      auto* memory = static_cast<char*>(tape.allocate(MemoryKind::device, kParts * kBytes));
      tape.fill(memory, 0, kParts * kBytes, stream);
      auto part = [&](std::int64_t first, std::int64_t parts = 1) {
        return View{memory + static_cast<std::size_t>(first) * kBytes, DType::f32, {parts * kCount}};
      };
      const View own = part(0), all = part(1, 3), sum = part(4), dealt = part(5, 3), message = part(8);
      std::vector<std::vector<float>> in, out(kLaunches, std::vector<float>(kParts * kCount));
      for (int launch = 0; launch < kLaunches; ++launch) {
        in.emplace_back();
        for (std::int64_t i = 0; i < kCount; ++i) in.back().push_back(value(launch, rank, i));
      }
      {
        MemcpyCommunicator group({.piece_kib = 1, .through = way});
        group.connect(folder.rank(rank, kRanks, 20), tape);
        group.register_buffer(memory, kParts * kBytes);
        for (int launch = 0; launch < kLaunches; ++launch) {
          if (launch % kRanks == rank && launch % 4 == 0) ::usleep(3000);
          const auto number = static_cast<std::size_t>(launch);
          tape.copy(own.data, in[number].data(), kBytes, stream);
          tape.running = launch == 0;
          if (launch > 0) {
            tape.play();
          } else {
            group.all_gather(own, all, {}, stream);
            group.reduce_scatter(all, sum, {}, Reduction::sum, stream);
            group.all_reduce(sum, Reduction::sum, stream);
            group.all_to_all(all, dealt, {}, stream);
            group.broadcast(own, 1, stream);
            if (rank == 2) group.send(part(3), 0, stream);
            if (rank == 0) group.receive(message, 2, stream);
          }
          tape.running = false;
          tape.copy(out[number].data(), memory, kParts * kBytes, stream);
        }
        tape.synchronize(stream);
        group.barrier();
      }
      tape.release(MemoryKind::device, memory);
      for (int launch = 0; launch < kLaunches; ++launch)
        if (out[static_cast<std::size_t>(launch)] != wanted(launch, rank))
          throw Error({}, {.what = "other values in launch " + std::to_string(launch)});
    });
    CHECK(found == std::vector<std::string>(kRanks));
  }
}
