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
  void all_reduce(const View& in_out, Reduction reduction, Stream) override {
    need_reducible(in_out, reduction);
    begin(in_out);
  }
  void reduce_scatter(const View& in, const View& out, Counts counts, Reduction reduction, Stream stream) override {
    need_reducible(in, reduction);
    copy(in, out, counts, stream);
  }
  void all_gather(const View& in, const View& out, Counts counts, Stream stream) override {
    copy(in, out, counts, stream);
  }
  void all_to_all(const View& in, const View& out, Counts counts, Stream stream) override {
    copy(in, out, counts, stream);
  }
  void broadcast(const View& in_out, int root, Stream) override {
    need(root == 0, "a broadcast from a rank that is not there");
    begin(in_out);
  }
  void send(const View&, int, Stream) override { need(false, "there is no other rank"); }
  void receive(const View&, int, Stream) override { need(false, "there is no other rank"); }

  // ---- faults ----
  std::optional<std::string> error() override {
    if (aborted_) return "was aborted";
    if (options_.fail_at == 0 || calls_ < options_.fail_at) return std::nullopt;
    return "failed at collective " + std::to_string(options_.fail_at) + ", as fail_at says";
  }
  void abort() noexcept override { aborted_ = true; }

 private:
  // ---- calls that peers could not answer are refused, though here there are none ----
  static void need(bool fits, const char* otherwise) {
    if (!fits) fail_internal("communicator solo", otherwise);
  }

  static void need_reducible(const View& view, Reduction reduction) {
    const bool sums_alone = view.dtype == DType::bf16 || view.dtype == DType::f64;
    need(view.dtype == DType::f32 || (sums_alone && reduction == Reduction::sum), "a dtype that is not reduced");
  }

  void need_registered(const View& view) const {
    const char* memory = view.as<char>();
    const auto behind = buffers_.upper_bound(memory);
    need(behind != buffers_.begin() && memory + view.bytes() <= std::prev(behind)->first + std::prev(behind)->second,
         "a view of memory that is not registered");
  }

  void begin(const View& view) {
    need_registered(view);
    ++calls_;
  }

  void copy(const View& in, const View& out, Counts counts, Stream stream) {
    need(counts.empty() || (counts.size() == 1 && counts[0] == in.count()), "counts that do not fill the whole");
    need(out.count() == in.count() && out.dtype == in.dtype, "slabs of other sizes or dtypes");
    need_registered(out);
    begin(in);
    if (!error() && in.data != out.data) device_->copy(out.data, in.data, in.bytes(), stream);
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
