// Small models on a device: its fused forms against their parts, and the whole against the oracle.
#include <algorithm>
#include <cmath>
#include <set>

#include "conformance/device/device_ops.h"
#include "conformance/harness/trial.h"
#include "conformance/report.h"
#include "quern/step_state.h"
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

/// A device, which it borrows, with these of its fused forms only.
class Offering final : public testkit::ForwardingDevice {
 public:
  Offering(Device& device, std::vector<Fusion> fusions)
      : ForwardingDevice(std::shared_ptr<Device>(&device, [](Device*) {})), fusions_(std::move(fusions)) {}
  std::span<const Fusion> fusions() const override { return fusions_; }

 private:
  std::vector<Fusion> fusions_;
};

/// Such a form may sum in another order than the matmul alone, so that `models_agree` compares it.
bool has_product(const Fusion& fusion) { return fusion.pattern.find("matmul") != std::string::npos; }

/// Every matmul of linears on e4m3 operands, so that producers fuse with quantizations.
class EightBit final : public PrecisionBackend {
 public:
  explicit EightBit(bool delayed) : delayed_(delayed) {}
  const PrecisionTraits& traits() const override { return traits_; }
  void lower(const ProductSite& site, Lowering& lowering) const override {
    if (site.product == Product::loss) return;
    const bool by_weight = site.product != Product::weight_gradient;
    const std::vector<ValueId> a = quantized(site.product == Product::output ? site.x : site.dy, lowering);
    const std::vector<ValueId> b =
        by_weight ? lowering.working_copy(site.parameter, "quantize", format()) : quantized(site.x, lowering);
    lowering.produce("matmul",
                     {by_weight ? a[0] : a[2], site.product == Product::output ? b[0] : b[2], site.bias, a[1], b[1]},
                     {{"transpose_a", std::int64_t{0}}, {"transpose_b", std::int64_t{1}}});
  }

 private:
  static Attributes format() { return {{"format", std::string("e4m3")}}; }
  std::vector<ValueId> quantized(ValueId x, Lowering& lowering) const {
    const std::string name = lowering.program()[x].name + ".e4m3";
    Attributes attributes = format();
    if (!delayed_ || !lowering.training()) return lowering.emit("quantize", {x}, attributes, name);
    attributes.set("history", std::int64_t{2});
    attributes.set("margin", std::int64_t{0});
    ValueId state = lowering.state({.name = name + ".state",
                                    .dtype = DType::f32,
                                    .extents = {kScaleStateWords + 2},
                                    .advance = "advance_scale",
                                    .attributes = attributes});
    return lowering.emit("quantize_delayed", {x, state}, attributes, name);
  }

  bool delayed_;
  PrecisionTraits traits_{.activation = DType::bf16, .working = DType::bf16, .matmul = DType::e4m3};
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
  double loss = 0;
  Tensors gradients;
};

Taken take(const Subject& subject, const Model& model, const PrecisionBackend& precision, Device& device,
           bool recompute, std::set<std::string>* kinds = nullptr, int micro_steps = 1) {
  Trial trial(subject.host, {model, device, &precision, nullptr}, options_for(recompute));
  if (kinds) kinds->merge(kinds_of(trial.plan()));
  const Batch batch = random_batch({2, 16}, model.traits().vocabulary, 3);
  if (micro_steps > 1) trial.engine().micro_step(random_batch({2, 16}, model.traits().vocabulary, 4), {});
  Taken taken{0, trial.gradients(batch, static_cast<std::uint32_t>(micro_steps) - 1)};
  taken.loss = trial.loss(batch);
  return taken;
}

}  // namespace

std::string fusions_change_no_bit(const Subject& subject, Device& device) {
  std::vector<Fusion> exact(device.fusions().begin(), device.fusions().end());
  const std::size_t products = std::erase_if(exact, has_product);
  Offering unfused(device, {}), fused(device, exact);
  const testkit::PlainPrecision fp32(DType::f32), bf16(DType::bf16);
  const EightBit current(false), delayed(true);
  const std::pair<const PrecisionBackend*, std::string> precisions[] = {
      {&fp32, "fp32"}, {&bf16, "bf16"}, {&current, "e4m3"}, {&delayed, "e4m3 with delayed scales"}};
  std::set<std::string> kinds;
  std::string refused;
  for (const TinyModelOptions& form : forms()) {
    const TinyModel model(form);
    for (const auto& [precision, name] : precisions) {
      for (bool recompute : {false, true}) {
        Taken want;
        try {
          want = take(subject, model, *precision, unfused, recompute);
        } catch (const Error& error) {  // what it cannot run has no fused form to compare
          if (error.code() == ErrorCode::internal) throw;
          refused = "; " + name + " refused: " + error.what();
          continue;
        }
        const Taken got = take(subject, model, *precision, fused, recompute, &kinds);
        const std::string difference = first_difference(got.gradients, want.gradients);
        need(difference.empty(), "gradient of " + difference + " in " + name + " with fused ops", "other bits",
             "those without");
        need(got.loss == want.loss, "loss in " + name + " with fused ops", number(got.loss), number(want.loss));
      }
    }
  }
  const auto run = std::count_if(exact.begin(), exact.end(), [&](const Fusion& f) { return kinds.contains(f.kind); });
  return std::to_string(run) + " of " + std::to_string(exact.size()) +
         " fused forms occur in the models, and change no bit" +
         (products > 0 ? "; " + std::to_string(products) + " with a matmul are not compared" : "") + refused;
}

namespace {

/// Of relative errors.
struct Bounds {
  double worst, median;  ///< over the gradients of a model
  double loss;
};

/// Returns the worst error of a gradient.
double agree(const Taken& got, const Taken& want, const Bounds& bounds, const std::string& where) {
  std::vector<double> errors;
  for (const auto& [name, values] : want.gradients) {
    errors.push_back(testkit::relative_error(got.gradients.at(name), values));
    need(errors.back() <= bounds.worst, "relative error of the gradient of " + name + " in " + where,
         number(errors.back()), "at most " + number(bounds.worst));
  }
  std::sort(errors.begin(), errors.end());
  const double median = errors[errors.size() / 2];
  need(median <= bounds.median, "median of the gradients' relative errors in " + where, number(median),
       "at most " + number(bounds.median));
  need(std::fabs(got.loss - want.loss) <= bounds.loss * want.loss, "loss in " + where, number(got.loss),
       number(want.loss) + " within " + number(100 * bounds.loss) + " %");
  return errors.back();
}

}  // namespace

std::string models_agree(const Subject& subject, Device& device) {
  std::unique_ptr<Device> reference = oracle(subject.host);
  const testkit::PlainPrecision fp32(DType::f32), bf16(DType::bf16);
  const EightBit current(false), delayed(true);
  struct Case {
    const PrecisionBackend& precision;
    std::string name;
    Bounds bounds;
    bool may_refuse;
  };
  // Sums in another order: fp32 errs in its last bits; in bf16 values at the edge of two round either way, 2^-8 of
  // each. In e4m3 an amax that does moves its scale, and with it one code in sixteen by an eighth; tensor cores keep
  // about 14 bits of such sums, so that one rounding in 2^6 may differ. Measured on the oracle, with random elements of
  // every matmul moved by one unit in the last place, one of 4096 in bf16 and one of 64 in e4m3: of the gradients of a
  // model the worst moves by up to 0.02 and 0.36, the median by 0.01 and 0.22, the loss by 0.0011 and 0.008.
  const Case cases[] = {{fp32, "f32", {1e-4, 1e-4, 1e-4}, false},
                        {bf16, "bf16", {0.05, 0.02, 0.004}, false},
                        {current, "e4m3", {0.4, 0.25, 0.02}, true},
                        {delayed, "e4m3 with delayed scales", {0.4, 0.25, 0.02}, true}};
  double worst = 0;
  std::string refused;
  for (const TinyModelOptions& form : forms()) {
    const TinyModel model(form);
    for (const Case& c : cases) {
      Taken got;
      try {
        got = take(subject, model, c.precision, device, false, nullptr, 2);
      } catch (const Error& error) {
        if (!c.may_refuse || error.code() == ErrorCode::internal) throw;
        refused = "; " + c.name + " refused: " + error.what();
        continue;
      }
      const double error =
          agree(got, take(subject, model, c.precision, *reference, false, nullptr, 2), c.bounds, c.name);
      if (&c == &cases[0]) worst = std::max(worst, error);
    }
  }
  return "worst gradient error in f32 " + number(worst) + refused;
}

}  // namespace quern::conformance
