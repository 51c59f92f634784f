// Fault: puts and gets are done when they are called, whatever the stream still has to do.
#include <cstring>

#include "host_store.h"

namespace {

class AtOnce final : public HostStore {
 public:
  AtOnce() : HostStore("at_once") {}

 private:
  void copy(void* to, const void* from, std::size_t bytes, quern::Stream) override { std::memcpy(to, from, bytes); }
};

}  // namespace

QUERN_PLUGIN("offload", "at_once", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::OffloadStore>("at_once", "host memory that does not wait", {},
                                    [](const quern::OptionValues&) { return std::make_unique<AtOnce>(); });
}
