// fp32 everywhere: the reference that other recipes are compared with.
#include "quern/plugin.h"

namespace {

class Fp32 final : public quern::PrecisionBackend {
 public:
  const quern::PrecisionTraits& traits() const override { return traits_; }
  void lower(const quern::ProductSite& site, quern::Lowering& lowering) const override {
    quern::lower_to_matmul(site, lowering);
  }

 private:
  quern::PrecisionTraits traits_{
      .activation = quern::DType::f32, .working = quern::DType::f32, .matmul = quern::DType::f32};
};

}  // namespace

QUERN_PLUGIN("precision", "fp32", manifest) {
  manifest.version = "0.1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::PrecisionBackend>("fp32", "fp32 activations, weights and matmuls", {},
                                        [](const quern::OptionValues&) { return std::make_unique<Fp32>(); });
}
