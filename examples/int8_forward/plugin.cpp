// Forward matmuls of int8 operands, as in post-training quantization, so that a model adapts to them; matmuls of
// gradients, and all other ops, stay bf16. x (N, in) and W (out, in) are rounded to q = round(x / scale), scale = amax
// / 127, with one scale for each row of x (a token) and of W (a channel):
//
//   y = (qx qw^T) * scale_x * scale_w + b
//
// The gradient passes through the rounding as if there were none (Bengio et al., "Estimating or Propagating Gradients
// Through Stochastic Neurons", 2013).
#include "quern/plugin.h"

namespace {

using namespace quern;

struct Options {
  std::string activations = "int8";
};

OptionTable<Options> options() {
  OptionTable<Options> t;
  t.add("activations", &Options::activations, "format of activations as operands; bf16: only weights are rounded")
      .one_of({"int8", "bf16"});
  return t;
}

class Int8Forward final : public PrecisionBackend {
 public:
  explicit Int8Forward(const Options& options) : activations_(options.activations == "int8") {}

  const PrecisionTraits& traits() const override { return traits_; }

  // Called once for each matmul of each linear, and for the loss, which contains the LM head's matmuls.
  void lower(const ProductSite& site, Lowering& lowering) const override {
    if (site.product != Product::output) return lower_to_matmul(site, lowering);
    const Attributes format = {{"format", "i8"}};
    // Made from the master weights once per optimizer step: (out, in) i8, and (out) scales.
    std::vector<ValueId> w = lowering.working_copy(site.parameter, "quantize_rows", format);
    std::vector<ValueId> x = {site.x, kNoValue};
    if (activations_)  // where several linears read one value, equal requests are one op
      x = lowering.emit("quantize_rows", {site.x}, format, lowering.program()[site.x].name + ".i8");
    lowering.produce("matmul", {x[0], w[0], site.bias, x[1], w[1]},
                     {{"transpose_a", std::int64_t{0}}, {"transpose_b", std::int64_t{1}}});
  }

 private:
  bool activations_;
  PrecisionTraits traits_{.activation = DType::bf16, .working = DType::bf16, .matmul = DType::bf16};
};

}  // namespace

QUERN_PLUGIN("precision", "int8_forward", manifest) {
  manifest.version = "0.1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<PrecisionBackend>(
      "int8_forward", "forward matmuls of int8 operands, one scale a row; gradients and the rest bf16",
      options().specs(),
      [](const OptionValues& values) { return std::make_unique<Int8Forward>(options().bind(values)); });
}
