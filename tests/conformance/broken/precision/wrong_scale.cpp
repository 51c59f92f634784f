// Fault: the activation is divided by the weight's scale, and the matmul multiplied by the activation's own.
#include "quern/plugin.h"

namespace {

using namespace quern;

class WrongScale final : public PrecisionBackend {
 public:
  const PrecisionTraits& traits() const override { return traits_; }
  void lower(const ProductSite& site, Lowering& lowering) const override {
    if (site.product != Product::output) return lower_to_matmul(site, lowering);
    const Attributes format{{"format", std::string("e4m3")}};
    const std::string name = lowering.program()[site.x].name + ".e4m3";
    auto x = lowering.emit("quantize", {site.x}, format, name);
    auto weight = lowering.working_copy(site.parameter, "quantize", format);
    auto codes = lowering.emit("quantize_by", {site.x, weight[1]}, format, name + ".codes");
    lowering.produce("matmul", {codes[0], weight[0], site.bias, x[1], weight[1]},
                     {{"transpose_a", std::int64_t{0}}, {"transpose_b", std::int64_t{1}}});
  }

 private:
  PrecisionTraits traits_{.activation = DType::bf16, .working = DType::bf16, .matmul = DType::e4m3};
};

}  // namespace

QUERN_PLUGIN("precision", "wrong_scale", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<PrecisionBackend>("wrong_scale", "e4m3 with a scale of the wrong operand", {},
                                 [](const OptionValues&) { return std::make_unique<WrongScale>(); });
}
