// Gradients of models: against finite differences of the loss, beside frozen parameters, and of adapters.
#include <algorithm>
#include <cmath>

#include "conformance/model/model_contracts.h"
#include "conformance/model/model_trial.h"
#include "quern/testkit/compare.h"
#include "transform/lora.h"

namespace quern::conformance {

namespace {

double dot(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += double{a[i]} * b[i];
  return sum;
}

/// Slope of the loss along `direction` at the parameter's values, by central differences.
class Slopes {
 public:
  explicit Slopes(Trial& trial) : trial_(trial), batch_(batch_for(trial, 3)) {}

  double along(const PlannedTensor& master, const std::vector<float>& values, const std::vector<float>& direction,
               double step) {
    double losses[2];
    for (int side : {0, 1}) {
      std::vector<float> moved = values;
      for (std::size_t i = 0; i < moved.size(); ++i)
        moved[i] += static_cast<float>((side ? step : -step) * direction[i]);
      trial_.write("master", master.parameter, master.layer, moved);
      losses[side] = trial_.loss_sum(batch_);
    }
    trial_.write("master", master.parameter, master.layer, values);
    largest_loss_ = std::max(losses[0], losses[1]);
    return (losses[1] - losses[0]) / (2 * step);
  }
  /// What rounding the losses to fp32 may do to the last slope.
  double noise(double step) const { return 4e-7 * largest_loss_ / step; }
  const Batch& batch() const { return batch_; }

 private:
  Trial& trial_;
  Batch batch_;
  double largest_loss_ = 0;
};

/// Along the gradient itself the slope is its norm. That does not see elements whose gradient is missing, so random
/// directions follow, along which the slope is the gradient's share.
std::string gradients_agree(const ModelTrial& made, int directions = 4) {
  Trial& trial = *made.trial;
  trial.stir();
  Slopes slopes(trial);
  const Tensors gradients = trial.gradients(slopes.batch());
  double worst = 0;
  for (const auto& [name, gradient] : gradients) {
    const std::size_t slash = name.find('/');
    const int layer = slash == std::string::npos ? -1 : std::atoi(name.c_str() + slash + 1);
    const PlannedTensor& master = trial.plan().tensor({"master", name.substr(0, slash), layer});
    const std::vector<float> values = trial.tensor("master", master.parameter, layer);
    const double norm = std::sqrt(dot(gradient, gradient));
    need(std::isfinite(norm), "gradient of " + name, "a norm of " + number(norm), "a finite one");
    for (int direction = 0; direction < directions; ++direction) {
      std::vector<float> along = gradient;
      if (direction > 0)
        along = testkit::random_normal(static_cast<std::int64_t>(values.size()), static_cast<std::uint64_t>(direction));
      const double length = std::sqrt(dot(along, along));
      if (length == 0) continue;  // a gradient of zero: the random directions look at it
      for (float& element : along) element /= static_cast<float>(length);
      // A step that moves the loss by about 0.03, yet small beside the weights.
      const double step = std::min(0.1, 0.03 / std::max(norm, 1e-3));
      const double want = slopes.along(master, values, along, step), got = dot(gradient, along);
      const double spread = direction == 0 ? norm : norm / std::sqrt(static_cast<double>(values.size()));
      const double tolerance = 0.01 * std::fabs(want) + 0.02 * spread + slopes.noise(step) + 1e-5;
      need(std::fabs(got - want) <= tolerance, "gradient of " + name + (direction ? " along a random direction" : ""),
           number(got), number(want) + " by finite differences, within " + number(tolerance));
      if (direction == 0) worst = std::max(worst, std::fabs(got - want) / norm);
    }
  }
  return std::to_string(gradients.size()) + " tensors, worst relative error " + number(worst);
}

/// Every second parameter is frozen, from the first or the second on.
class HalfFrozen final : public ModelTransform {
 public:
  HalfFrozen(std::unique_ptr<Model> model, std::size_t first) : ModelTransform(std::move(model)), first_(first) {}
  std::vector<ParameterSpec> parameters() const override {
    std::vector<ParameterSpec> specs = base().parameters();
    for (std::size_t i = first_; i < specs.size(); i += 2) specs[i].trainable = false;
    return specs;
  }

 private:
  std::size_t first_;
};

}  // namespace

std::string check_gradients(const Subject& subject) { return gradients_agree(fresh_trial(subject)); }

std::string check_gradients_of_variants(const Subject& subject) {
  std::size_t tried = 0;
  for (const OptionSpec& spec : subject.factory.options) {
    const OptionValue* now = subject.values.find(spec.key);
    if (!now || spec.key == "config") continue;
    std::vector<OptionValue> values = other_values(spec, *now);
    if (spec.type != OptionType::text && values.size() > 1) values.resize(1);
    if (is_depth(spec.key)) values = {OptionValue(std::int64_t{1}), OptionValue(std::int64_t{3})};
    for (const OptionValue& value : values) {
      std::unique_ptr<Model> other;
      try {
        other = subject.make_with<Model>(spec.key, value);
      } catch (const Error&) {
        continue;  // of the contract "stated values work"
      }
      try {
        gradients_agree(fresh_trial(subject, nullptr, {}, false, std::move(other)), 2);
      } catch (const Broken& fault) {
        broken(fault.what + " with " + spec.key + " = " + to_string(value), fault.got, fault.want);
      }
      ++tried;
    }
  }
  return std::to_string(tried) + " models";
}

std::string check_frozen(const Subject& subject) {
  ModelTrial all = fresh_trial(subject);
  all.trial->stir();
  const Tensors want = all.trial->gradients(batch_for(*all.trial, 4));
  std::size_t compared = 0;
  for (std::size_t first : {0, 1}) {
    if (all.model->parameters().size() < 2) break;
    ModelTrial half =
        fresh_trial(subject, nullptr, {}, false, std::make_unique<HalfFrozen>(subject.make<Model>(), first));
    for (const PlannedTensor& master : all.trial->plan().tensors)
      if (master.kind == "master")
        for (const char* kind : {"master", "working"})
          if (half.trial->plan().find({kind, master.parameter, master.layer}) &&
              half.trial->plan().find({kind, master.parameter, master.layer})->owner != TensorOwner::loading)
            half.trial->write(kind, master.parameter, master.layer,
                              all.trial->tensor("master", master.parameter, master.layer));
    const Tensors got = half.trial->gradients(batch_for(*half.trial, 4));
    for (const auto& [name, gradient] : got) {
      need(want.contains(name) && want.at(name) == gradient, "gradient of " + name + " beside frozen parameters",
           "other bits", "those without frozen ones");
      ++compared;
    }
    need(got.size() < want.size(), "gradients with every second parameter frozen", std::to_string(got.size()),
         "fewer than " + std::to_string(want.size()));
  }
  return std::to_string(compared) + " tensors";
}

std::string check_adapters(const Subject& subject) {
  OpSet ops = builtin_ops();
  for (const OpSpec& spec : subject.host.ops()) ops.add(spec);
  std::unique_ptr<Model> adapted;
  try {
    adapted = std::make_unique<LoraModel>(subject.make<Model>(), ops, LoraOptions{.rank = 2, .targets = {kAllLinear}});
  } catch (const Error& error) {
    if (error.code() != ErrorCode::config) throw;
    return std::string("refused: ") + error.what();
  }
  return gradients_agree(fresh_trial(subject, nullptr, {}, false, std::move(adapted)));
}

}  // namespace quern::conformance
