// bf16 activations and compute weights; matmuls read bf16 and accumulate in fp32. Master weights are the optimizer's
// business.
#include "quern/plugin.h"
#include "quern/options.h"

namespace {

using namespace quern;

struct Bf16Options {
  std::string transposed_weights = "none";
};

OptionTable<Bf16Options> option_table() {
  OptionTable<Bf16Options> table;
  table
      .add("transposed_weights", &Bf16Options::transposed_weights,
           "kept: input gradients read a transposed copy of each block's weights (two bytes a parameter), since GPUs "
           "are faster with K-major operands; none: they read the weights without a copy")
      .one_of({"none", "kept"});
  return table;
}

class Bf16 final : public PrecisionBackend {
 public:
  explicit Bf16(const Bf16Options& options) : transposed_(options.transposed_weights == "kept") {}

  const PrecisionTraits& traits() const override { return traits_; }
  void lower(const ProductSite& site, Lowering& lowering) const override {
    if (!transposed_ || site.product != Product::input_gradient) return lower_to_matmul(site, lowering);
    const ValueId turned = lowering.working_copy(site.parameter, "transpose", {})[0];  // (in, out)
    lowering.produce("matmul", {site.dy, turned}, {{"transpose_a", std::int64_t{0}}, {"transpose_b", std::int64_t{1}}});
  }

 private:
  bool transposed_;
  PrecisionTraits traits_{.activation = DType::bf16, .working = DType::bf16, .matmul = DType::bf16};
};

}  // namespace

QUERN_PLUGIN("precision", "bf16", manifest) {
  manifest.version = "0.1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<PrecisionBackend>(
      "bf16", "bf16 activations, weights and matmuls, fp32 accumulators", option_table().specs(),
      [](const OptionValues& values) { return std::make_unique<Bf16>(option_table().bind(values)); });
}
