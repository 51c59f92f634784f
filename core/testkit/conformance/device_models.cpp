// Small models on a device: its fused forms against their parts, and the whole against the oracle.
#include <algorithm>
#include <cmath>
#include <set>

#include "conformance/device_ops.h"
#include "conformance/report.h"
#include "conformance/trial.h"
#include "quern/testkit/forwarding_device.h"
#include "quern/testkit/tiny_model.h"

namespace quern::conformance {

namespace {

using testkit::TinyModel;
using testkit::TinyModelOptions;

/// Forms of a model that together have every op of the vocabulary; sizes that most kernels take.
std::vector<TinyModelOptions> forms() {
  TinyModelOptions plain{
      .layers = 2, .width = 64, .vocabulary = 96, .heads = 4, .kv_heads = 2, .head_dim = 16, .ffn = 80};
  TinyModelOptions normed = plain, layered = plain;
  normed.head_norm = normed.tied = true;
  layered.layer_norm = layered.bias = true;
  return {plain, normed, layered};
}

/// The device without its fused forms.
class Unfused final : public testkit::ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  std::span<const Fusion> fusions() const override { return {}; }
};

PlanOptions options_for(bool recompute) {
  PlanOptions options;
  options.geometry = {2, 16};
  if (recompute) options.recompute = {"block"};
  return options;
}

void add_kinds(const PlacedProgram& placed, std::set<std::string>& kinds) {
  for (const Op& op : placed.program.ops) kinds.insert(op.kind);
}

std::set<std::string> kinds_of(const Plan& plan) {
  std::set<std::string> kinds;
  for (const PlacedProgram* placed : {&plan.embed, &plan.embed_backward, &plan.head_train, &plan.head_evaluate})
    add_kinds(*placed, kinds);
  for (const LayerClass& layers : plan.classes)
    for (const PlacedProgram* placed : {&layers.forward, &layers.backward, &layers.evaluate}) add_kinds(*placed, kinds);
  return kinds;
}

struct Taken {
  double loss;
  Tensors gradients;
};

Taken take(const Subject& subject, const Model& model, const PrecisionBackend& precision, Device& device,
           bool recompute, std::set<std::string>* kinds = nullptr) {
  Trial trial(subject.host, {model, device, &precision, nullptr}, options_for(recompute));
  if (kinds) kinds->merge(kinds_of(trial.plan()));
  const Batch batch = random_batch({2, 16}, model.traits().vocabulary, 3);
  Taken taken{0, trial.gradients(batch)};
  taken.loss = trial.loss(batch);
  return taken;
}

}  // namespace

std::string fusions_change_no_bit(const Subject& subject, Device& device) {
  Unfused unfused(std::shared_ptr<Device>(&device, [](Device*) {}));
  std::set<std::string> kinds;
  for (const TinyModelOptions& form : forms()) {
    for (DType dtype : {DType::f32, DType::bf16}) {
      for (bool recompute : {false, true}) {
        const TinyModel model(form);
        const testkit::PlainPrecision precision(dtype);
        const Taken got = take(subject, model, precision, device, recompute, &kinds),
                    want = take(subject, model, precision, unfused, recompute);
        const std::string difference = first_difference(got.gradients, want.gradients);
        need(difference.empty(), "gradient of " + difference + " in " + std::string(name_of(dtype)) + " with fused ops",
             "other bits", "those without");
        need(got.loss == want.loss, "loss in " + std::string(name_of(dtype)) + " with fused ops", number(got.loss),
             number(want.loss));
      }
    }
  }
  int run = 0, offered = 0;
  for (const Fusion& fusion : device.fusions()) ++offered, run += kinds.contains(fusion.kind) ? 1 : 0;
  return std::to_string(run) + " of " + std::to_string(offered) + " fused forms occur in the models, and change no bit";
}

std::string models_agree(const Subject& subject, Device& device) {
  std::unique_ptr<Device> reference = oracle(subject.host);
  double worst = 0;
  for (const TinyModelOptions& form : forms()) {
    for (DType dtype : {DType::f32, DType::bf16}) {
      const TinyModel model(form);
      const testkit::PlainPrecision precision(dtype);
      const Taken got = take(subject, model, precision, device, false),
                  want = take(subject, model, precision, *reference, false);
      // Sums in another order: fp32 errs in its last bits; in bf16 values at the edge of two round either way, 2^-8 of
      // each, which a sum over many averages.
      const double bound = dtype == DType::f32 ? 1e-4 : 0.02;
      for (const auto& [name, values] : want.gradients) {
        const double error = testkit::relative_error(got.gradients.at(name), values);
        need(error <= bound, "relative error of the gradient of " + name + " in " + std::string(name_of(dtype)),
             number(error), "at most " + number(bound));
        if (dtype == DType::f32) worst = std::max(worst, error);
      }
      need(std::fabs(got.loss - want.loss) <= bound * want.loss, "loss in " + std::string(name_of(dtype)),
           number(got.loss), number(want.loss) + " within " + number(100 * bound) + " %");
    }
  }
  return "worst gradient error in f32 " + number(worst);
}

}  // namespace quern::conformance
