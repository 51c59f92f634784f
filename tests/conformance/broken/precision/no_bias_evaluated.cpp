// Fault: evaluations leave biases out.
#include "quern/plugin.h"
#include "quern/testkit/tiny_model.h"

namespace {

using namespace quern;

class NoBiasEvaluated final : public testkit::PlainPrecision {
 public:
  void lower(const ProductSite& site, Lowering& lowering) const override {
    ProductSite less = site;
    if (!lowering.training()) less.bias = kNoValue;
    PlainPrecision::lower(less, lowering);
  }
};

}  // namespace

QUERN_PLUGIN("precision", "no_bias_evaluated", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<PrecisionBackend>("no_bias_evaluated", "fp32, evaluated without biases", {},
                                 [](const OptionValues&) { return std::make_unique<NoBiasEvaluated>(); });
}
