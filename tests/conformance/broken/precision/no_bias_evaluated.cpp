// Fault: evaluations leave biases out.
#include "quern/plugin.h"

namespace {

using namespace quern;

class NoBiasEvaluated final : public PrecisionBackend {
 public:
  const PrecisionTraits& traits() const override { return traits_; }
  void lower(const ProductSite& site, Lowering& lowering) const override {
    ProductSite less = site;
    if (!lowering.training()) less.bias = kNoValue;
    lower_to_matmul(less, lowering);
  }

 private:
  PrecisionTraits traits_;
};

}  // namespace

QUERN_PLUGIN("no_bias_evaluated", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<PrecisionBackend>("no_bias_evaluated", "fp32, evaluated without biases", {},
                                 [](const OptionValues&) { return std::make_unique<NoBiasEvaluated>(); });
}
