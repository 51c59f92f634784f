// Fault: the number of steps that the backend's rounding depends on is kept in a kernel, not in the state that a
// checkpoint saves, so a restart counts from zero.
#include <cmath>

#include "quern/plugin.h"
#include "quern/testkit/tiny_model.h"

namespace {

using namespace quern;

/// state[0] counts optimizer steps.
class CountKernel final : public Kernel {
 public:
  void launch(std::span<const View>, std::span<const View> outputs, const Exec&) const override {
    outputs[0].as<float>()[0] = static_cast<float>(++steps_);
  }

 private:
  mutable int steps_ = 0;
};

/// y = x (1 + 2^-20 steps)
class DriftKernel final : public Kernel {
 public:
  void launch(std::span<const View> inputs, std::span<const View> outputs, const Exec&) const override {
    const float factor = 1 + 0x1p-20f * inputs[1].as<float>()[0];
    for (std::int64_t i = 0; i < inputs[0].count(); ++i) outputs[0].as<float>()[i] = inputs[0].as<float>()[i] * factor;
  }
};

class LosesState final : public testkit::PlainPrecision {
 public:
  void lower(const ProductSite& site, Lowering& lowering) const override {
    if (site.product != Product::output || !lowering.training()) return PlainPrecision::lower(site, lowering);
    const std::string name = lowering.program()[site.x].name;
    ValueId state = lowering.state({.name = name + ".steps",
                                    .dtype = DType::f32,
                                    .extents = {4},
                                    .advance = "test_count_steps",
                                    .attributes = {}});
    ProductSite drifting = site;
    drifting.x = lowering.emit("test_drift", {site.x, state}, {}, name + ".drifting")[0];
    PlainPrecision::lower(drifting, lowering);
  }
};

void same_as_first(InferContext& c) {
  c.outputs[0].shape = c.inputs[0]->shape;
  c.outputs[0].dtype = c.inputs[0]->dtype;
}

}  // namespace

QUERN_PLUGIN("precision", "loses_state", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.ops.push_back({.kind = "test_count_steps",
                          .inputs = {"state"},
                          .outputs = {"next"},
                          .infer = same_as_first,
                          .updates = {{0, 0}}});
  manifest.ops.push_back({.kind = "test_drift", .inputs = {"x", "state"}, .outputs = {"y"}, .infer = same_as_first});
  manifest.kernels.push_back(
      {"cpu", "test_count_steps", [](const OpInstance&) { return std::make_unique<CountKernel>(); }});
  manifest.kernels.push_back({"cpu", "test_drift", [](const OpInstance&) { return std::make_unique<DriftKernel>(); }});
  manifest.add<PrecisionBackend>("loses_state", "fp32 that drifts with the steps", {},
                                 [](const OptionValues&) { return std::make_unique<LosesState>(); });
}
