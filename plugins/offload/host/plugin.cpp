// Pinned host memory: puts and gets are copies by the device's copy engines, on the stream that they are given.
#include "quern/plugin.h"

#include <deque>

#include "pinned_pages.h"
#include "quern/error.h"

namespace {

using namespace quern;

class HostStore final : public OffloadStore {
 public:
  const OffloadTraits& traits() const override { return traits_; }

  void open(Device& device, const StorePlace&) override {
    device_ = &device;
    traits_.put_rate = traits_.get_rate = device.traits().host_rate;
  }
  OffloadSlot reserve(std::size_t bytes) override {
    slots_.emplace_back(*device_, bytes);
    return static_cast<OffloadSlot>(slots_.size() - 1);
  }

  void put(OffloadSlot slot, std::size_t offset, const void* device_memory, std::size_t bytes, Stream stream) override {
    device_->copy(at(slot, offset), device_memory, bytes, stream);
  }
  void get(OffloadSlot slot, std::size_t offset, void* device_memory, std::size_t bytes, Stream stream) override {
    device_->copy(device_memory, at(slot, offset), bytes, stream);
  }
  void prefetch(OffloadSlot, std::size_t, std::size_t) override {}
  void* map(OffloadSlot) override {
    fail_internal("offload host", "map was asked for, but traits().mappable is false");
  }
  void flush() override { device_->synchronize(device_->stream(StreamKind::copy_out)); }
  std::optional<std::string> error() override { return {}; }

 private:
  std::byte* at(OffloadSlot slot, std::size_t offset) const {
    return slots_[static_cast<std::size_t>(slot)].data() + offset;
  }

  Device* device_ = nullptr;
  std::deque<PinnedPages> slots_;
  OffloadTraits traits_{.id = "host", .can_capture = true, .in_host_memory = true};
};

}  // namespace

QUERN_PLUGIN("offload", "host", manifest) {
  manifest.version = "0.1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<OffloadStore>("host", "pinned host memory, reached by copy engines", {},
                             [](const OptionValues&) { return std::make_unique<HostStore>(); });
}
