// Fault: offsets are rounded down to pages.
#include "host_store.h"

namespace {

class RoundsOffset final : public HostStore {
 public:
  RoundsOffset() : HostStore("rounds_offset") {}

 private:
  std::size_t offset_of(std::size_t offset) const override { return offset & ~std::size_t{511}; }
};

}  // namespace

QUERN_PLUGIN("offload", "rounds_offset", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::OffloadStore>("rounds_offset", "host memory by pages", {},
                                    [](const quern::OptionValues&) { return std::make_unique<RoundsOffset>(); });
}
