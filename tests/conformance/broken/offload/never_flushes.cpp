// Fault: flush returns while puts are under way.
#include "host_store.h"

namespace {

class NeverFlushes final : public HostStore {
 public:
  NeverFlushes() : HostStore("never_flushes") {}
  void flush() override {}
};

}  // namespace

QUERN_PLUGIN("offload", "never_flushes", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::OffloadStore>("never_flushes", "host memory whose flush does nothing", {},
                                    [](const quern::OptionValues&) { return std::make_unique<NeverFlushes>(); });
}
