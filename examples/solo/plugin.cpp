// The communicator of a run with one rank: every collective is what it is for one, so a training gives the same bits as
// without it. A place to begin a real one from, and with `fail_at` a way to see what a run does when one fails.
#include <atomic>
#include <iterator>
#include <map>

#include "quern/error.h"
#include "quern/plugin.h"

namespace {

using namespace quern;

struct Options {
  std::int64_t fail_at = 0;
};

OptionTable<Options> options() {
  OptionTable<Options> t;
  t.add("fail_at", &Options::fail_at, "number of the collective from which on this communicator fails; 0: never")
      .at_least(0);
  return t;
}

class Solo final : public Communicator {
 public:
  explicit Solo(const Options& options) : options_(options) {}

  // ---- capabilities ----
  const CommunicatorTraits& traits() const override { return traits_; }
  int rank() const override { return 0; }
  int size() const override { return 1; }

  // ---- set-up ----
  void connect(const Rendezvous& rendezvous, Device& device) override {
    if (rendezvous.size != 1)
      throw Error(ErrorCode::config, {.where = "communicator solo",
                                      .what = "is for one rank",
                                      .found = std::to_string(rendezvous.size) + " ranks",
                                      .expected = "parallel.ranks = 1",
                                      .next = "choose another communicator"});
    device_ = &device;
  }
  void register_buffer(void* memory, std::size_t bytes) override { buffers_[static_cast<char*>(memory)] = bytes; }
  void unregister_buffer(void* memory) override { buffers_.erase(static_cast<char*>(memory)); }
  void barrier() override {
    if (const auto fault = error())
      throw Error(ErrorCode::communication, {.where = "communicator solo", .what = *fault});
  }

  // ---- hot path: enqueued on `stream`, never awaited. A sum over one rank is there already ----
  void all_reduce(const View& in_out, Reduction, Stream) override { begin(in_out); }
  void reduce_scatter(const View& in, const View& out, Counts, Reduction, Stream stream) override {
    copy(in, out, stream);
  }
  void all_gather(const View& in, const View& out, Counts, Stream stream) override { copy(in, out, stream); }
  void all_to_all(const View& in, const View& out, Counts, Stream stream) override { copy(in, out, stream); }
  void broadcast(const View& in_out, int, Stream) override { begin(in_out); }
  void send(const View&, int, Stream) override { refuse_peer(); }
  void receive(const View&, int, Stream) override { refuse_peer(); }

  // ---- faults ----
  std::optional<std::string> error() override {
    if (aborted_) return "was aborted";
    if (options_.fail_at == 0 || calls_ < options_.fail_at) return std::nullopt;
    return "failed at collective " + std::to_string(options_.fail_at) + ", as fail_at says";
  }
  void abort() noexcept override { aborted_ = true; }

 private:
  [[noreturn]] static void refuse_peer() { fail_internal("communicator solo", "has no other rank"); }

  /// A collective of memory that peers would not know is refused, though here there are none.
  void begin(const View& view) {
    ++calls_;
    const char* memory = view.as<char>();
    const auto behind = buffers_.upper_bound(memory);
    if (behind == buffers_.begin() || memory + view.bytes() > std::prev(behind)->first + std::prev(behind)->second)
      fail_internal("communicator solo", "a view of memory that is not registered");
  }

  void copy(const View& in, const View& out, Stream stream) {
    begin(in);
    if (in.data != out.data) device_->copy(out.data, in.data, in.bytes(), stream);
  }

  Options options_;
  std::map<const char*, std::size_t> buffers_;
  Device* device_ = nullptr;             // of the run, which outlives its communicator's collectives
  std::atomic<std::int64_t> calls_ = 0;  // error() and abort() come from any thread
  std::atomic<bool> aborted_ = false;
  CommunicatorTraits traits_{.id = "solo", .can_capture = true, .sums_in_rank_order = true};
};

}  // namespace

QUERN_PLUGIN("communicator", "solo", manifest) {
  manifest.version = "0.1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<Communicator>("solo", "one rank, which talks to nobody", options().specs(),
                             [](const OptionValues& values) { return std::make_unique<Solo>(options().bind(values)); });
}
