// Fault: where memory for a larger buffer runs out, its size stays, and puts have no buffer from then on.
#include "host_store.h"

namespace {

class KeepsSize final : public HostStore {
 public:
  KeepsSize() : HostStore("keeps_size") {}
  ~KeepsSize() override {
    if (buffer_) device_->release(quern::MemoryKind::pinned, buffer_);
  }
  void open(quern::Device& device, const quern::StorePlace& place) override {
    device_ = &device;
    HostStore::open(device, place);
  }
  void put(quern::OffloadSlot slot, std::size_t offset, const void* memory, std::size_t bytes,
           quern::Stream stream) override {
    if (size_ < bytes) {  // release() waits for copies that use the smaller one
      if (buffer_) device_->release(quern::MemoryKind::pinned, buffer_);
      buffer_ = nullptr;
      size_ = bytes;
      buffer_ = device_->allocate(quern::MemoryKind::pinned, bytes);
    }
    if (!buffer_) return;
    device_->copy(buffer_, memory, bytes, stream);
    HostStore::put(slot, offset, buffer_, bytes, stream);
  }

 private:
  quern::Device* device_ = nullptr;
  void* buffer_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace

QUERN_PLUGIN("offload", "keeps_size", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::OffloadStore>("keeps_size", "host memory behind a buffer that a failure spoils", {},
                                    [](const quern::OptionValues&) { return std::make_unique<KeepsSize>(); });
}
