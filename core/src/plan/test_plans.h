#pragma once
// What tests of plans share: a device that only plans, and plans of the tiny model for it.

#include <functional>
#include <utility>
#include <vector>

#include "optimizer/adamw.h"
#include "plan/plan.h"
#include "quern/testkit/forwarding_device.h"
#include "quern/testkit/tiny_model.h"

namespace quern {

/// Takes every op without a workspace, unless `support` says otherwise, and has the fused forms that a test gives it.
class PlanningDevice : public testkit::ForwardingDevice {
 public:
  using Support = std::function<OpSupport(const OpInstance&)>;
  explicit PlanningDevice(Support support = {}) : ForwardingDevice(nullptr), support_(std::move(support)) {}
  const DeviceTraits& traits() const override { return device_traits; }
  std::span<const Fusion> fusions() const override { return own_fusions; }
  OpSupport query(const OpInstance& op) const override { return support_ ? support_(op) : OpSupport{}; }

  DeviceTraits device_traits{
      .id = "planning", .name = {}, .memory_rate = 1e9, .host_rate = 1e8, .matmul_rates = {{DType::f32, 1e9}}};
  std::vector<Fusion> own_fusions;

 private:
  Support support_;
};

/// Two rows of 8 tokens; three micro-batches may be under way.
inline PlanOptions tiny_options() {
  PlanOptions options;
  options.geometry = {2, 8};
  options.uploads = 4;
  return options;
}

/// Bit 0 of `places` puts masters into the store, bit 1 moments, bit 2 gradients, bit 3 compute weights, bit 4
/// activations.
inline PlanOptions stored_options(unsigned places, int ahead, const std::string& store = "host") {
  PlanOptions options = tiny_options();
  options.ahead = ahead;
  StatePlacement& state = options.state;
  unsigned bit = 0;
  for (Placement* placed : {&state.master, &state.moments, &state.gradients, &state.weights, &state.activations})
    if (places >> bit++ & 1) placed->memory = store;
  return options;
}

/// Under AdamW with fp32 moments.
inline Plan plan_of(const Model& model, const PlanOptions& options, const Device& device = PlanningDevice(),
                    const PrecisionBackend& precision = testkit::PlainPrecision(DType::bf16),
                    const std::vector<OpSpec>& custom = {}, const std::vector<OffloadTraits>& stores = {}) {
  const AdamW optimizer{AdamWOptions{}};
  return make_plan({model, precision, device, optimizer, custom, nullptr, stores}, options);
}
inline Plan tiny_plan(const PlanOptions& options, const Device& device = PlanningDevice(),
                      const PrecisionBackend& precision = testkit::PlainPrecision(DType::bf16),
                      const testkit::TinyModelOptions& form = {}, const std::vector<OffloadTraits>& stores = {}) {
  return plan_of(testkit::TinyModel(form), options, device, precision, {}, stores);
}

}  // namespace quern
