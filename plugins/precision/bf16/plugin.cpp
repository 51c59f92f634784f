// bf16 activations and working weights; products read bf16 and sum in fp32. Master weights are the optimizer's
// business.
#include "quern/plugin.h"

namespace {

class Bf16 final : public quern::PrecisionBackend {
 public:
  const quern::PrecisionTraits& traits() const override { return traits_; }
  void lower(const quern::ProductSite& site, quern::Lowering& lowering) const override {
    quern::lower_to_matmul(site, lowering);
  }

 private:
  quern::PrecisionTraits traits_{
      .activation = quern::DType::bf16, .working = quern::DType::bf16, .matmul = quern::DType::bf16};
};

}  // namespace

QUERN_PLUGIN("bf16", manifest) {
  manifest.version = "0.1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::PrecisionBackend>("bf16", "bf16 activations, weights and products, fp32 sums", {},
                                        [](const quern::OptionValues&) { return std::make_unique<Bf16>(); });
}
