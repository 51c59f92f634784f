// Of models: parameters and programs that fit together, a loss at initialisation near a guess's, and trainings that
// repeat and resume bit for bit; config.json, gradients and causality are files of their own.
#include "conformance/model/model_contracts.h"

#include <cmath>

#include "conformance/contracts.h"
#include "conformance/model/model_trial.h"
#include "conformance/model/own_ops.h"
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

/// What a target is one of: tokens, or what the input's bound says; 0: not known.
std::int64_t choices_of(const Plan& plan) {
  const Value* targets = input_named(plan, "targets");
  return targets && targets->below > 0 ? targets->below : plan.model.vocabulary;
}

std::string first_loss(const Subject& subject) {
  ModelTrial made = fresh_trial(subject);
  const double loss = made.trial->loss(batch_for(*made.trial, 3));
  const std::int64_t choices = choices_of(made.trial->plan());
  need(std::isfinite(loss), "loss at initialisation", number(loss), "a finite number");
  if (choices == 0) return number(loss);
  const double guess = std::log(static_cast<double>(choices));
  // Logits of deviation s add about s^2 / 2 to the loss of a guess; a model that starts beyond s = 1 starts badly.
  need(std::fabs(loss - guess) <= 0.5, "loss at initialisation", number(loss),
       "ln(" + std::to_string(choices) + ") = " + number(guess) + " of a guess, within 0.5");
  return number(loss) + ", a guess's is ln(" + std::to_string(choices) + ") = " + number(guess);
}

std::string repeats(const Subject& subject) {
  ModelTrial one = fresh_trial(subject), two = fresh_trial(subject), less = fresh_trial(subject, nullptr, {"block"});
  const Tensors want = one.trial->gradients(batch_for(*one.trial, 4));
  for (auto& [other, how] : {std::pair{&two, "a second run"}, {&less, "recomputing the block"}}) {
    const std::string difference = first_difference(other->trial->gradients(batch_for(*other->trial, 4)), want);
    need(difference.empty(), "gradient of " + difference + " after " + how, "other bits", "the same");
  }
  return "a second run and recomputation change no bit";
}

/// States of the model are moved by steps alone, and stay finite.
std::string states(const Subject& subject) {
  ModelTrial made = fresh_trial(subject);
  Trial& trial = *made.trial;
  std::vector<PlannedTensor> found;
  for (const PlannedTensor& tensor : trial.plan().tensors)
    if (tensor.owner == TensorOwner::precision) found.push_back(tensor);  // in fp32 all such states are the model's
  if (found.empty()) return "none";
  auto values = [&] {
    std::vector<std::vector<float>> all;
    for (const PlannedTensor& tensor : found) all.push_back(trial.tensor(tensor.kind, tensor.parameter, tensor.layer));
    return all;
  };
  const auto before = values();
  trial.loss(batch_for(trial, 3));
  need(values() == before, "states after an evaluation", "changed", "as before");
  trial.gradients(batch_for(trial, 3));
  need(values() == before, "states after a micro-batch, before the step's update", "changed", "as before");
  for (std::uint32_t step = 0; step < 50; ++step) {
    trial.train(step, step + 1);
    const auto now = values();
    for (std::size_t i = 0; i < now.size(); ++i) {
      const std::string what =
          "state " + found[i].kind + tensor_name(found[i]) + " after " + std::to_string(step + 1) + " steps";
      for (float value : now[i]) need(std::isfinite(value), what, number(value), "finite numbers");
      need(step != 4 || now[i] != before[i], what, "as at the start", "moved");
    }
  }
  return std::to_string(found.size()) + ", finite over 50 steps";
}

std::string trains_in_bf16(const Subject& subject) {
  const testkit::PlainPrecision bf16(DType::bf16);
  ModelTrial narrow = fresh_trial(subject, &bf16), wide = fresh_trial(subject);
  const double got = narrow.trial->loss(batch_for(*narrow.trial, 3)),
               want = wide.trial->loss(batch_for(*wide.trial, 3));
  // bf16 keeps 8 bits: logits of order one carry 2^-8 a rounding, and the mean of their errors is smaller.
  need(std::fabs(got - want) <= 0.02 * want, "loss in bf16", number(got), number(want) + " within 2 %");
  return number(got) + ", fp32 " + number(want);
}

std::string model_resumes(const Subject& subject) {
  std::vector<ModelTrial> made;  // models and devices outlive their trials
  made.reserve(4);
  return resumes([&] {
    made.push_back(fresh_trial(subject));
    return std::move(made.back().trial);
  });
}

}  // namespace

void check_model(Report& report, const Subject& subject) {
  std::unique_ptr<Model> model = subject.make<Model>();
  if (!report.needed("parameters and shapes", [&] { return sound_programs(subject, *model); })) return;
  report.contract("config.json", [&] { return check_own_config(subject, *model); });
  report.contract("loss at initialisation", [&] { return first_loss(subject); });
  report.contract("gradients", [&] { return check_gradients(subject); });
  report.contract("gradients of variants", [&] { return check_gradients_of_variants(subject); });
  report.contract("frozen parameters", [&] { return check_frozen(subject); });
  report.contract("adapters", [&] { return check_adapters(subject); });
  if (!subject.host.ops().empty())
    for (DType dtype : {DType::f32, DType::bf16})
      report.contract("own ops in " + std::string(name_of(dtype)), [&] {
        const testkit::PlainPrecision precision(dtype);
        return check_own_ops(subject, fresh_trial(subject, &precision).trial->plan());
      });
  report.contract("causal", [&] { return check_causal(subject); });
  report.contract("determinism", [&] { return repeats(subject); });
  report.contract("states", [&] { return states(subject); });
  report.contract("bf16", [&] { return trains_in_bf16(subject); });
  report.contract("save and restore", [&] { return model_resumes(subject); });
}

}  // namespace quern::conformance
