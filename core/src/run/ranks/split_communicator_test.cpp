#include "run/ranks/split_communicator.h"

#include <doctest/doctest.h>

#include "engine/recording_device.h"

using namespace quern;

namespace {

/// Writes down what it is asked for.
struct Part final : Communicator {
  Part(std::vector<std::string>& given, CommunicatorTraits about) : calls(given), about_(std::move(about)) {}
  const CommunicatorTraits& traits() const override { return about_; }
  int rank() const override { return 1; }
  int size() const override { return 2; }
  void connect(const Rendezvous& rendezvous, Device&) override { add("connect " + rendezvous.address); }
  void register_buffer(void*, std::size_t) override { add("register"); }
  void unregister_buffer(void*) override { add("unregister"); }
  void barrier() override { add("barrier"); }
  void all_reduce(const View&, Reduction, Stream) override { add("all_reduce"); }
  void reduce_scatter(const View&, const View&, Counts, Reduction, Stream) override { add("reduce_scatter"); }
  void all_gather(const View&, const View&, Counts, Stream) override { add("all_gather"); }
  void all_to_all(const View&, const View&, Counts, Stream) override { add("all_to_all"); }
  void broadcast(const View&, int, Stream) override { add("broadcast"); }
  void send(const View&, int, Stream) override { add("send"); }
  void receive(const View&, int, Stream) override { add("receive"); }
  std::optional<std::string> error() override { return fault; }
  void abort() noexcept override {
    if (!fault) fault = "rank 1 ended it";
  }
  void add(const std::string& call) { calls.push_back(about_.id + " " + call); }

  std::vector<std::string>& calls;
  std::optional<std::string> fault;

 private:
  CommunicatorTraits about_;
};

/// Gathers go to b, the rest to a.
struct Pair {
  std::vector<std::string> calls;
  Part* a = nullptr;
  Part* b = nullptr;
  std::unique_ptr<SplitCommunicator> both;

  Pair() {
    std::vector<std::unique_ptr<Communicator>> parts;
    parts.push_back(std::unique_ptr<Communicator>(
        a = new Part(calls, {.id = "a", .can_capture = true, .sums_in_rank_order = true})));
    parts.push_back(
        std::unique_ptr<Communicator>(b = new Part(calls, {.id = "b", .needs_watchdog = true, .launcher = "mpirun"})));
    both = std::make_unique<SplitCommunicator>(std::move(parts), SplitCommunicator::Choice{.all_gather = 1});
  }
};

}  // namespace

TEST_CASE("collectives go to the part that was chosen, set-up to all, the rest to the first") {
  Pair split;
  Communicator& both = *split.both;
  RecordingDevice device;
  both.connect({.rank = 1, .size = 2, .address = "file:/f/ab"}, device);
  both.register_buffer(nullptr, 1);
  both.barrier();
  both.all_gather({}, {}, {}, {});
  both.reduce_scatter({}, {}, {}, Reduction::sum, {});
  both.all_reduce({}, Reduction::sum, {});
  both.all_to_all({}, {}, {}, {});
  both.broadcast({}, 0, {});
  both.send({}, 0, {});
  both.receive({}, 0, {});
  both.unregister_buffer(nullptr);
  CHECK(split.calls == std::vector<std::string>{"a connect file:/f/ab-a", "b connect file:/f/ab-b", "a register",
                                                "b register", "a barrier", "b all_gather", "a reduce_scatter",
                                                "a all_reduce", "a all_to_all", "a broadcast", "a send", "a receive",
                                                "a unregister", "b unregister"});
  CHECK((both.rank() == 1 && both.size() == 2));
  const CommunicatorTraits& traits = both.traits();
  CHECK((traits.id == "a+b" && !traits.can_capture && traits.needs_watchdog));
  CHECK((traits.sums_in_rank_order && traits.launcher == "mpirun"));
}

TEST_CASE("a fault of one part has its name and stays the first, and asking for it waits for no abort") {
  Pair split;
  CHECK_FALSE(split.both->error());
  split.b->fault = "rank 0 is gone";
  CHECK(split.both->error() == "b: rank 0 is gone");
  CHECK_FALSE(split.a->fault);
  split.both->abort();
  CHECK(split.a->fault == "rank 1 ended it");
  CHECK(split.both->error() == "b: rank 0 is gone");
}
