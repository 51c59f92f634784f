// Fault: a put waits until the stream has passed it.
#include "host_store.h"

namespace {

class Waits final : public HostStore {
 public:
  Waits() : HostStore("waits") {}
  void open(quern::Device& device, const quern::StorePlace& place) override {
    device_ = &device;
    HostStore::open(device, place);
  }
  void put(quern::OffloadSlot slot, std::size_t offset, const void* memory, std::size_t bytes,
           quern::Stream stream) override {
    HostStore::put(slot, offset, memory, bytes, stream);
    device_->synchronize(stream);
  }

 private:
  quern::Device* device_ = nullptr;
};

}  // namespace

QUERN_PLUGIN("offload", "waits", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::OffloadStore>("waits", "host memory whose puts wait", {},
                                    [](const quern::OptionValues&) { return std::make_unique<Waits>(); });
}
