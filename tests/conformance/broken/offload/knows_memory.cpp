// Fault: a put of memory that it has seen before copies as many bytes as it saw there first, as one does whose list of
// registered memory is not renewed.
#include <algorithm>
#include <map>

#include "host_store.h"

namespace {

class KnowsMemory final : public HostStore {
 public:
  KnowsMemory() : HostStore("knows_memory") {}
  void put(quern::OffloadSlot slot, std::size_t offset, const void* memory, std::size_t bytes,
           quern::Stream stream) override {
    HostStore::put(slot, offset, memory, std::min(bytes, seen_.emplace(memory, bytes).first->second), stream);
  }

 private:
  std::map<const void*, std::size_t> seen_;
};

}  // namespace

QUERN_PLUGIN("offload", "knows_memory", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::OffloadStore>("knows_memory", "host memory that registers once", {},
                                    [](const quern::OptionValues&) { return std::make_unique<KnowsMemory>(); });
}
