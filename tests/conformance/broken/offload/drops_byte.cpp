// Fault: a put of one byte is passed over.
#include "host_store.h"

namespace {

class DropsByte final : public HostStore {
 public:
  DropsByte() : HostStore("drops_byte") {}
  void put(quern::OffloadSlot slot, std::size_t offset, const void* memory, std::size_t bytes,
           quern::Stream stream) override {
    if (bytes > 1) HostStore::put(slot, offset, memory, bytes, stream);
  }
};

}  // namespace

QUERN_PLUGIN("offload", "drops_byte", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::OffloadStore>("drops_byte", "host memory whose puts have two bytes at least", {},
                                    [](const quern::OptionValues&) { return std::make_unique<DropsByte>(); });
}
