#pragma once
// A device, a store and a communicator that write down what an engine asks of them, for its tests. Copies and fills are
// done at once; launches, puts, gets and collectives only take a line.

#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plan/test_plans.h"
#include "quern/communicator.h"
#include "quern/offload.h"

namespace quern {

class RecordingDevice final : public PlanningDevice {
 public:
  std::vector<std::string> calls;
  std::vector<std::string> runs;  ///< outer ranges of a profiler
  void record_call(std::string call) { calls.push_back(std::move(call)); }
  /// The calls recorded since the last call.
  std::vector<std::string> take() { return std::exchange(calls, {}); }

  std::string name_of(Stream stream) const {
    static const char* const kNames[] = {"compute", "copy_in", "copy_out", "communication"};
    return kNames[static_cast<const char*>(stream.handle) - streams_];
  }
  /// "arena+64", "pinned+0", or "host".
  std::string name_of(const void* memory) const {
    for (const Block& block : blocks_)
      if (memory >= block.begin && memory < block.begin + block.bytes)
        return (block.kind == MemoryKind::device ? "arena+" : "pinned+") +
               std::to_string(static_cast<const std::byte*>(memory) - block.begin);
    return memory ? "host" : "-";
  }

  void open(int) override {}
  std::unique_ptr<Kernel> prepare(const OpInstance& op) override {
    record_call("prepare " + op.kind);
    return std::make_unique<RecordingKernel>(*this, op.kind);
  }
  void* allocate(MemoryKind kind, std::size_t bytes) override {
    record_call(std::string("allocate ") + (kind == MemoryKind::device ? "device" : "pinned"));
    blocks_.push_back({kind, static_cast<std::byte*>(std::malloc(bytes + 1)), bytes});
    return blocks_.back().begin;
  }
  void release(MemoryKind kind, void* memory) noexcept override {
    record_call(std::string("release ") + (kind == MemoryKind::device ? "device" : "pinned"));
    std::free(memory);
  }
  void pin(void*, std::size_t bytes) override { record_call("pin " + std::to_string(bytes)); }
  void unpin(void*) noexcept override { record_call("unpin"); }
  Stream stream(StreamKind kind) override { return {streams_ + static_cast<int>(kind)}; }
  Event make_event() override { return {&events_.emplace_back(Recorded{.number = events_.size()})}; }
  void copy(void* to, const void* from, std::size_t bytes, Stream stream) override {
    record_call("copy " + name_of(from) + " to " + name_of(to) + ", " + std::to_string(bytes) + ", " + name_of(stream));
    std::memmove(to, from, bytes);
  }
  void fill(void* to, std::uint8_t byte, std::size_t bytes, Stream stream) override {
    record_call("fill " + name_of(to) + " with " + std::to_string(byte) + ", " + std::to_string(bytes) + ", " +
                name_of(stream));
    std::memset(to, byte, bytes);
  }
  void record(Event event, Stream stream) override {
    of(event).recorded = calls.size();
    record_call("record " + number(event) + ", " + name_of(stream));
  }
  void wait(Stream stream, Event event) override { record_call("wait " + number(event) + ", " + name_of(stream)); }
  void write_word(std::uint32_t* word, std::uint32_t value, Stream stream) override {
    *word = value;
    record_call("word " + std::to_string(value) + ", " + name_of(stream));
  }
  void synchronize(Stream stream) override { record_call("synchronize " + name_of(stream)); }
  void synchronize(Event event) override { record_call("synchronize " + number(event)); }
  std::unique_ptr<Graph> capture(Stream stream, const std::function<void()>& work) override {
    record_call("capture " + name_of(stream) + " {");
    work();
    record_call("}");
    return std::make_unique<RecordingGraph>(*this);
  }
  /// In calls.
  double elapsed(Event from, Event to) override {
    return static_cast<double>(of(to).recorded) - static_cast<double>(of(from).recorded);
  }
  void begin_range(const char* name) override {
    if (ranges_++ == 0) runs.emplace_back(name);
  }
  void end_range() override { --ranges_; }

 private:
  class RecordingKernel final : public Kernel {
   public:
    RecordingKernel(RecordingDevice& device, std::string kind) : device_(device), kind_(std::move(kind)) {}
    void launch(std::span<const View> inputs, std::span<const View> outputs, const Exec& exec) const override {
      std::string call = "launch " + kind_;
      for (const View& view : inputs) call += " " + device_.name_of(view.data);
      call += " ->";
      for (const View& view : outputs) call += " " + device_.name_of(view.data);
      if (exec.workspace) call += ", workspace " + device_.name_of(exec.workspace);
      device_.record_call(call + ", " + device_.name_of(exec.stream));
    }

   private:
    RecordingDevice& device_;
    std::string kind_;
  };
  class RecordingGraph final : public Graph {
   public:
    explicit RecordingGraph(RecordingDevice& device) : device_(device) {}
    void launch(Stream stream) override { device_.record_call("graph, " + device_.name_of(stream)); }

   private:
    RecordingDevice& device_;
  };
  struct Block {
    MemoryKind kind;
    std::byte* begin;
    std::size_t bytes;
  };

  struct Recorded {
    std::size_t number = 0, recorded = 0;
  };
  static Recorded& of(Event event) { return *static_cast<Recorded*>(event.handle); }
  static std::string number(Event event) { return "event " + std::to_string(of(event).number); }

  char streams_[4] = {};
  std::deque<Recorded> events_;  // a deque keeps handles to its elements valid as it grows
  std::vector<Block> blocks_;
  int ranges_ = 0;
};

class RecordingStore final : public OffloadStore {
 public:
  RecordingStore(RecordingDevice& device, bool can_capture) : device_(device) { traits_.can_capture = can_capture; }
  const OffloadTraits& traits() const override { return traits_; }
  void open(Device&, const StorePlace&) override {}
  OffloadSlot reserve(std::size_t bytes) override {
    device_.record_call("reserve " + std::to_string(bytes));
    return 7;
  }
  void put(OffloadSlot slot, std::size_t offset, const void* from, std::size_t bytes, Stream stream) override {
    device_.record_call("put " + device_.name_of(from) + " to " + place(slot, offset, bytes, stream));
  }
  void get(OffloadSlot slot, std::size_t offset, void* to, std::size_t bytes, Stream stream) override {
    device_.record_call("get " + device_.name_of(to) + " from " + place(slot, offset, bytes, stream));
  }
  void prefetch(OffloadSlot, std::size_t, std::size_t) override {}
  void* map(OffloadSlot) override { return nullptr; }
  void flush() override {}
  std::optional<std::string> error() override { return {}; }

 private:
  std::string place(OffloadSlot slot, std::size_t offset, std::size_t bytes, Stream stream) const {
    return "slot " + std::to_string(slot) + "+" + std::to_string(offset) + ", " + std::to_string(bytes) + ", " +
           device_.name_of(stream);
  }

  RecordingDevice& device_;
  OffloadTraits traits_{.id = "recording"};
};

class RecordingCommunicator final : public Communicator {
 public:
  RecordingCommunicator(RecordingDevice& device, bool can_capture) : device_(device) {
    traits_.can_capture = can_capture;
  }
  const CommunicatorTraits& traits() const override { return traits_; }
  int rank() const override { return 0; }
  int size() const override { return 2; }
  void connect(const Rendezvous&, Device&) override {}
  void register_buffer(void* memory, std::size_t bytes) override {
    device_.record_call("register " + device_.name_of(memory) + ", " + std::to_string(bytes));
  }
  void all_reduce(const View& view, Reduction, Stream stream) override {
    device_.record_call("all_reduce " + device_.name_of(view.data) + ", " + device_.name_of(stream));
  }
  void unregister_buffer(void*) override {}
  void barrier() override {}
  void reduce_scatter(const View&, const View&, Counts, Reduction, Stream) override {}
  void all_gather(const View&, const View&, Counts, Stream) override {}
  void all_to_all(const View&, const View&, Counts, Stream) override {}
  void broadcast(const View&, int, Stream) override {}
  void send(const View&, int, Stream) override {}
  void receive(const View&, int, Stream) override {}
  std::optional<std::string> error() override { return {}; }
  void abort() noexcept override {}

 private:
  RecordingDevice& device_;
  CommunicatorTraits traits_{.id = "recording"};
};

}  // namespace quern
