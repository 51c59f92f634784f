// Fault: ends the process as if all were well.
#include <cstdlib>

#include "quern/plugin.h"

namespace {

using namespace quern;

class Exits final : public PrecisionBackend {
 public:
  const PrecisionTraits& traits() const override { return traits_; }
  void lower(const ProductSite&, Lowering&) const override { std::exit(0); }

 private:
  PrecisionTraits traits_;
};

}  // namespace

QUERN_PLUGIN("exits", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<PrecisionBackend>("exits", "ends the process", {},
                                 [](const OptionValues&) { return std::make_unique<Exits>(); });
}
