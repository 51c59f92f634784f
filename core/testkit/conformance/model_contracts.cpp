// Of models: parameters and programs that fit together, gradients against finite differences of the loss, a loss at
// initialisation near a guess's, and trainings that repeat and resume bit for bit. fp32 on the oracle.
#include <algorithm>
#include <cmath>
#include <fstream>
#include <functional>

#include <nlohmann/json.hpp>

#include "base/files/test_directory.h"
#include "conformance/contracts.h"
#include "conformance/trial.h"
#include "quern/testkit/compare.h"
#include "quern/testkit/model_conformance.h"
#include "quern/testkit/tiny_model.h"

namespace quern::conformance {

namespace {

constexpr std::int64_t kLargestModel = 2'000'000;  // parameters; finite differences run it some hundred times

std::string sound_programs(const Subject& subject, const Model& model) {
  for (DType dtype : {DType::f32, DType::bf16})
    for (const std::string& fault : testkit::model_faults(model, dtype, subject.host.ops()))
      broken("in " + std::string(name_of(dtype)), fault, "parameters and programs that fit together");
  const std::int64_t count = testkit::parameter_count(model);
  need(count <= kLargestModel, "size of the configuration to check", std::to_string(count) + " parameters",
       "at most " + std::to_string(kLargestModel) + ": give smaller sizes with --set");
  return std::to_string(model.parameters().size()) + " parameter tensors, " + std::to_string(count) + " numbers";
}

/// Its config.json is JSON, and the model made from it has the same programs.
std::string own_config(const Subject& subject, const Model& model) {
  const std::string text = model.hf_config();
  nlohmann::json config = nlohmann::json::parse(text, nullptr, false);
  need(config.is_object(), "hf_config()", text.substr(0, 60), "a JSON object");
  need(config.contains("model_type"), "hf_config()", "no model_type", "what a config.json of Hugging Face has");
  TestDirectory scratch;
  std::ofstream(scratch / "config.json") << text;
  OptionValues values;
  values.set("config", scratch / "config.json");
  auto again = subject.host.create<Model>(subject.factory.id, values);
  need(testkit::model_programs(*again, subject.host.ops()) == testkit::model_programs(model, subject.host.ops()),
       "the model made from its own config.json", "other programs", "the same");
  return "model_type " + config["model_type"].dump();
}

PlanOptions options_for(const Model& model) {
  PlanOptions options;
  options.geometry = {3, std::min<std::int64_t>(7, model.traits().max_positions)};
  return options;
}

struct Made {
  std::unique_ptr<Device> device;
  std::unique_ptr<Model> model;
  std::unique_ptr<Trial> trial;
};

/// A trial of the model, everything in it new. `precision` outlives it.
Made fresh(const Subject& subject, const PrecisionBackend* precision = nullptr,
           const std::vector<std::string>& recompute = {}, bool documents = false) {
  Made made{oracle(subject.host), subject.make<Model>(), nullptr};
  PlanOptions options = options_for(*made.model);
  options.recompute = recompute;
  options.documents = documents;
  made.trial =
      std::make_unique<Trial>(subject.host, TrialParts{*made.model, *made.device, precision, nullptr}, options);
  return made;
}

Batch batch_for(Trial& trial, std::uint64_t seed) {
  return random_batch(trial.plan().options.geometry, trial.plan().model.vocabulary, seed);
}

std::string first_loss(const Subject& subject) {
  Made made = fresh(subject);
  const double loss = made.trial->loss(batch_for(*made.trial, 3));
  const double guess = std::log(static_cast<double>(made.trial->plan().model.vocabulary));
  need(std::isfinite(loss), "loss at initialisation", number(loss), "a finite number");
  // Logits of deviation s add about s^2 / 2 to the loss of a guess; a model that starts beyond s = 1 starts badly.
  need(std::fabs(loss - guess) <= 0.5, "loss at initialisation", number(loss),
       "ln(vocabulary) = " + number(guess) + " within 0.5");
  return number(loss) + ", ln(vocabulary) is " + number(guess);
}

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
std::string gradients_agree(const Subject& subject) {
  Made made = fresh(subject);
  Trial& trial = *made.trial;
  trial.stir();
  Slopes slopes(trial);
  const Tensors gradients = trial.gradients(slopes.batch());
  double worst = 0;
  for (const auto& [name, gradient] : gradients) {
    const std::size_t slash = name.find('/');
    const int layer = slash == std::string::npos ? -1 : std::atoi(name.c_str() + slash + 1);
    const PlannedTensor& master = trial.plan().tensor("master", name.substr(0, slash), layer);
    const std::vector<float> values = trial.tensor("master", master.parameter, layer);
    const double norm = std::sqrt(dot(gradient, gradient));
    need(std::isfinite(norm), "gradient of " + name, "a norm of " + number(norm), "a finite one");
    for (int direction = 0; direction < 4; ++direction) {
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

/// The sum of the losses of the tokens that `counts` names, before and after another token stands at `changed`.
void need_unseen(Trial& trial, Batch batch, std::int64_t changed, const std::function<bool(std::int64_t)>& counts,
                 const std::string& who) {
  const auto vocabulary = static_cast<std::int32_t>(trial.plan().model.vocabulary);
  for (std::size_t i = 0; i < batch.targets.size(); ++i)
    batch.targets[i] = counts(static_cast<std::int64_t>(i)) ? std::max(batch.targets[i], 0) : -1;
  const double want = trial.loss_sum(batch);
  std::int32_t& token = batch.tokens[static_cast<std::size_t>(changed)];
  token = (token + 1) % vocabulary;
  const double got = trial.loss_sum(batch);
  need(got == want, "loss of " + who, number(got) + " after the change, off by " + number(got - want),
       number(want) + ", bit for bit: they must not see it");
}

/// No token's loss depends on later tokens, on other rows, or on other documents of its row.
std::string causal(const Subject& subject) {
  Made made = fresh(subject);
  made.trial->stir();
  const Geometry geometry = made.trial->plan().options.geometry;
  const std::int64_t row = geometry.sequence;
  for (std::int64_t t = 0; t < row; ++t) {
    const std::int64_t changed = row + t;  // of the second row
    need_unseen(
        *made.trial, batch_for(*made.trial, 3), changed, [&](std::int64_t i) { return i / row != 1 || i < changed; },
        "tokens before and beside position " + std::to_string(t) + " when the token there changes");
  }
  Made packed = fresh(subject, nullptr, {}, true);
  packed.trial->stir();
  Batch batch = batch_for(*packed.trial, 3);
  const std::int64_t second = (row + 1) / 2;
  batch.documents.clear();
  for (std::int64_t start = 0; start < geometry.tokens(); start += row) {
    batch.documents.push_back(static_cast<std::int32_t>(start));
    if (second < row) batch.documents.push_back(static_cast<std::int32_t>(start + second));
    for (std::int64_t i = second; i < row; ++i)
      batch.positions[static_cast<std::size_t>(start + i)] = static_cast<std::int32_t>(i - second);
  }
  batch.documents.push_back(static_cast<std::int32_t>(geometry.tokens()));
  need_unseen(
      *packed.trial, batch, 0, [&](std::int64_t i) { return i >= second; },
      "a second document when the first one changes");
  return std::to_string(row) + " positions, and packed documents";
}

std::string repeats(const Subject& subject) {
  Made one = fresh(subject), two = fresh(subject), less = fresh(subject, nullptr, {"block"});
  const Tensors want = one.trial->gradients(batch_for(*one.trial, 4));
  for (auto& [other, how] : {std::pair{&two, "a second run"}, {&less, "recomputing the block"}}) {
    const std::string difference = first_difference(other->trial->gradients(batch_for(*other->trial, 4)), want);
    need(difference.empty(), "gradient of " + difference + " after " + how, "other bits", "the same");
  }
  return "a second run and recomputation change no bit";
}

std::string trains_in_bf16(const Subject& subject) {
  const testkit::PlainPrecision bf16(DType::bf16);
  Made narrow = fresh(subject, &bf16), wide = fresh(subject);
  const double got = narrow.trial->loss(batch_for(*narrow.trial, 3)),
               want = wide.trial->loss(batch_for(*wide.trial, 3));
  // bf16 keeps 8 bits: logits of order one carry 2^-8 a rounding, and the mean of their errors is smaller.
  need(std::fabs(got - want) <= 0.02 * want, "loss in bf16", number(got), number(want) + " within 2 %");
  return number(got) + ", fp32 " + number(want);
}

std::string model_resumes(const Subject& subject) {
  std::vector<Made> made;  // models and devices outlive their trials
  made.reserve(4);
  return resumes([&] {
    made.push_back(fresh(subject));
    return std::move(made.back().trial);
  });
}

}  // namespace

void check_model(Report& report, const Subject& subject) {
  std::unique_ptr<Model> model = subject.make<Model>();
  if (!report.contract("parameters and shapes", [&] { return sound_programs(subject, *model); })) return;
  report.contract("config.json", [&] { return own_config(subject, *model); });
  report.contract("loss at initialisation", [&] { return first_loss(subject); });
  report.contract("gradients", [&] { return gradients_agree(subject); });
  report.contract("causal", [&] { return causal(subject); });
  report.contract("determinism", [&] { return repeats(subject); });
  report.contract("bf16", [&] { return trains_in_bf16(subject); });
  report.contract("save and restore", [&] { return model_resumes(subject); });
}

}  // namespace quern::conformance
