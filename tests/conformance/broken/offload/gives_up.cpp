// No fault: after an allocation that failed it says so, and takes no more calls.
#include "host_store.h"

namespace {

class GivesUp final : public HostStore {
 public:
  GivesUp() : HostStore("gives_up") {}
  ~GivesUp() override {
    for (void* buffer : buffers_) device_->release(quern::MemoryKind::pinned, buffer);
  }
  void open(quern::Device& device, const quern::StorePlace& place) override {
    device_ = &device;
    HostStore::open(device, place);
  }
  void put(quern::OffloadSlot slot, std::size_t offset, const void* memory, std::size_t bytes,
           quern::Stream stream) override {
    if (fault_) quern::fail_internal("store", "a put after " + *fault_);
    try {
      if (bytes > largest_) buffers_.push_back(device_->allocate(quern::MemoryKind::pinned, largest_ = bytes));
    } catch (const quern::Error& error) {
      fault_ = error.what();
      throw;
    }
    HostStore::put(slot, offset, memory, bytes, stream);
  }
  std::optional<std::string> error() override { return fault_; }

 private:
  quern::Device* device_ = nullptr;
  std::size_t largest_ = 0;
  std::vector<void*> buffers_;
  std::optional<std::string> fault_;
};

}  // namespace

QUERN_PLUGIN("offload", "gives_up", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::OffloadStore>("gives_up", "host memory, until memory runs out", {},
                                    [](const quern::OptionValues&) { return std::make_unique<GivesUp>(); });
}
