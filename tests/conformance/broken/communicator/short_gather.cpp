// Fault: all_gather hands on whole packs of 16 bytes only.
#include "alone.h"

namespace {

class ShortGather final : public Alone {
 public:
  ShortGather() : Alone("short_gather") {}

 private:
  std::size_t gathered(std::size_t bytes) const override { return bytes & ~std::size_t{15}; }
};

}  // namespace

QUERN_PLUGIN("communicator", "short_gather", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::Communicator>("short_gather", "one rank, packs only", {},
                                    [](const quern::OptionValues&) { return std::make_unique<ShortGather>(); });
}
