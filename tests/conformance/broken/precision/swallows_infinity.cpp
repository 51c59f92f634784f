// Fault: infinities and NaN become numbers before a matmul.
#include <cmath>

#include "quern/plugin.h"
#include "quern/testkit/tiny_model.h"

namespace {

using namespace quern;

class ClampKernel final : public Kernel {
 public:
  void launch(std::span<const View> inputs, std::span<const View> outputs, const Exec&) const override {
    for (std::int64_t i = 0; i < inputs[0].count(); ++i) {
      const float value = inputs[0].as<float>()[i];
      outputs[0].as<float>()[i] = std::isfinite(value) ? value : 0.0f;
    }
  }
};

class Swallows final : public testkit::PlainPrecision {
 public:
  void lower(const ProductSite& site, Lowering& lowering) const override {
    ProductSite clamped = site;
    if (site.product == Product::output)
      clamped.x = lowering.emit("test_clamp", {site.x}, {}, lowering.program()[site.x].name + ".clamped")[0];
    PlainPrecision::lower(clamped, lowering);
  }
};

}  // namespace

QUERN_PLUGIN("precision", "swallows_infinity", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.ops.push_back({.kind = "test_clamp", .inputs = {"x"}, .outputs = {"y"}, .infer = [](InferContext& c) {
                            c.outputs[0].shape = c.inputs[0]->shape;
                            c.outputs[0].dtype = c.inputs[0]->dtype;
                          }});
  manifest.kernels.push_back({"cpu", "test_clamp", [](const OpInstance&) { return std::make_unique<ClampKernel>(); }});
  manifest.add<PrecisionBackend>("swallows_infinity", "fp32 of finite numbers", {},
                                 [](const OptionValues&) { return std::make_unique<Swallows>(); });
}
