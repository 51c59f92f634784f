// Fault: ends the process as if all were well.
#include <cstdlib>

#include "quern/plugin.h"
#include "quern/testkit/tiny_model.h"

namespace {

using namespace quern;

class Exits final : public testkit::PlainPrecision {
 public:
  void lower(const ProductSite&, Lowering&) const override { std::exit(0); }
};

}  // namespace

QUERN_PLUGIN("precision", "exits", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<PrecisionBackend>("exits", "ends the process", {},
                                 [](const OptionValues&) { return std::make_unique<Exits>(); });
}
