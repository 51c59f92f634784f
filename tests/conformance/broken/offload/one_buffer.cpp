// Fault: large copies pass a buffer that all streams share.
#include "host_store.h"

namespace {

class OneBuffer final : public HostStore {
 public:
  OneBuffer() : HostStore("one_buffer"), buffer_(std::size_t{10} << 20) {}
  void open(quern::Device& device, const quern::StorePlace& place) override {
    device_ = &device;
    HostStore::open(device, place);
  }

 private:
  void copy(void* to, const void* from, std::size_t bytes, quern::Stream stream) override {
    if (bytes < std::size_t{1} << 20) return HostStore::copy(to, from, bytes, stream);
    device_->copy(buffer_.data(), from, bytes, stream);
    device_->copy(to, buffer_.data(), bytes, stream);
  }

  quern::Device* device_ = nullptr;
  std::vector<char> buffer_;
};

}  // namespace

QUERN_PLUGIN("offload", "one_buffer", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::OffloadStore>("one_buffer", "host memory behind one buffer", {},
                                    [](const quern::OptionValues&) { return std::make_unique<OneBuffer>(); });
}
