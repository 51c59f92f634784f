// No fault: waits on streams have no time-out of their own, and end when somebody calls abort(), as NCCL's.
#include <atomic>
#include <chrono>
#include <thread>

#include "memcpy_with.h"

namespace {

using namespace quern;

class Watched final : public MemcpyWith {
 public:
  Watched() : MemcpyWith("watched") { own_traits_ = MemcpyWith::traits(), own_traits_.needs_watchdog = true; }
  const CommunicatorTraits& traits() const override { return own_traits_; }
  void connect(const Rendezvous& rendezvous, Device& device) override {
    device_ = &device;
    MemcpyWith::connect(rendezvous, device);
  }
  void all_reduce(const View& in_out, Reduction reduction, Stream stream) override {
    MemcpyWith::all_reduce(in_out, reduction, stream);
    wait_for_abort(stream);
  }
  void receive(const View& out, int from, Stream stream) override {
    MemcpyWith::receive(out, from, stream);
    wait_for_abort(stream);
  }
  void abort() noexcept override {
    aborted_ = true;
    MemcpyWith::abort();
  }

 private:
  /// After a fault of the work before it in the stream.
  void wait_for_abort(Stream stream) {
    auto work = [this] {
      while (error() && !aborted_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    };
    device_->call(work, stream);
  }

  Device* device_ = nullptr;
  CommunicatorTraits own_traits_;
  std::atomic<bool> aborted_ = false;
};

}  // namespace

QUERN_PLUGIN("communicator", "watched", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<Communicator>("watched", "ends waits on streams by abort() alone", {},
                             [](const OptionValues&) { return std::make_unique<Watched>(); });
}
