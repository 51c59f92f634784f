// Fault: where memory for a larger buffer runs out, its size stays, and puts have no buffer from then on.
#include <map>

#include "host_store.h"

namespace {

class KeepsSize final : public HostStore {
 public:
  KeepsSize() : HostStore("keeps_size") {}
  ~KeepsSize() override {
    for (const auto& [handle, buffer] : buffers_)
      if (buffer.data) device_->release(quern::MemoryKind::pinned, buffer.data);
  }
  void open(quern::Device& device, const quern::StorePlace& place) override {
    device_ = &device;
    HostStore::open(device, place);
  }
  void put(quern::OffloadSlot slot, std::size_t offset, const void* memory, std::size_t bytes,
           quern::Stream stream) override {
    Buffer& buffer = buffers_[stream.handle];
    if (buffer.size < bytes) {  // release() waits for copies that use the smaller one
      if (buffer.data) device_->release(quern::MemoryKind::pinned, buffer.data);
      buffer.data = nullptr;
      buffer.size = bytes;
      buffer.data = device_->allocate(quern::MemoryKind::pinned, bytes);
    }
    if (!buffer.data) return;
    device_->copy(buffer.data, memory, bytes, stream);
    HostStore::put(slot, offset, buffer.data, bytes, stream);
  }

 private:
  struct Buffer {
    void* data = nullptr;
    std::size_t size = 0;
  };

  quern::Device* device_ = nullptr;
  std::map<void*, Buffer> buffers_;  // by stream
};

}  // namespace

QUERN_PLUGIN("offload", "keeps_size", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::OffloadStore>("keeps_size", "host memory behind a buffer that a failure spoils", {},
                                    [](const quern::OptionValues&) { return std::make_unique<KeepsSize>(); });
}
