// Fault: ends the process.
#include <cstdlib>

#include "quern/plugin.h"
#include "quern/testkit/tiny_model.h"

namespace {

using namespace quern;

class Aborts final : public testkit::PlainPrecision {
 public:
  void lower(const ProductSite&, Lowering&) const override { std::abort(); }
};

}  // namespace

QUERN_PLUGIN("precision", "aborts", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<PrecisionBackend>("aborts", "ends the process", {},
                                 [](const OptionValues&) { return std::make_unique<Aborts>(); });
}
