// Of optimizers and schedules, on a small model on the oracle.
#include <cmath>

#include "conformance/contracts.h"
#include "conformance/trial.h"
#include "quern/step_state.h"
#include "quern/testkit/tiny_model.h"

namespace quern::conformance {

namespace {

struct Made {
  std::unique_ptr<Device> device;
  std::unique_ptr<Optimizer> optimizer;
  std::unique_ptr<Trial> trial;
};

Made fresh(const Subject& subject, const Model& model) {
  Made made{oracle(subject.host), subject.make<Optimizer>(), nullptr};
  PlanOptions options;
  options.geometry = {4, 8};
  made.trial =
      std::make_unique<Trial>(subject.host, TrialParts{model, *made.device, nullptr, made.optimizer.get()}, options);
  return made;
}

std::string learns(const Subject& subject, const Model& model) {
  Made made = fresh(subject, model);
  Engine& engine = made.trial->engine();
  const Batch batch = random_batch({4, 8}, model.traits().vocabulary, 9);
  const double first = made.trial->loss(batch);
  StepState state{.learning_rate = 1e-2f, .clip_norm = 1.0f};
  for (; state.step < 30; state.updates = ++state.step) {
    engine.micro_step(batch, state);
    engine.update();
    engine.result();
  }
  const double last = made.trial->loss(batch);
  need(last < first, "loss of a batch after 30 steps on it at rate 0.01", number(last), "less than " + number(first));
  return number(first) + " to " + number(last) + " nats in 30 steps";
}

/// A step whose gradient is not finite changes nothing.
std::string skips(const Subject& subject, const Model& model) {
  Made made = fresh(subject, model);
  std::vector<float> norm = made.trial->tensor("master", "final_norm.weight", -1);
  norm[0] = std::nanf("");
  made.trial->write("master", "final_norm.weight", -1, norm);
  const State before = made.trial->state();
  made.trial->train(0, 1);
  const std::string changed = first_difference(made.trial->state(), before);
  need(changed.empty(), changed + " after a step whose gradient is NaN", "changed", "as before");
  return "";
}

/// At a learning rate of zero the weights stay, whatever the state does.
std::string keeps_to_rate(const Subject& subject, const Model& model) {
  Made made = fresh(subject, model);
  made.trial->train(0, 2);  // moments are not zero then
  const Tensors before = made.trial->all("master");
  made.trial->engine().micro_step(random_batch({4, 8}, model.traits().vocabulary, 9),
                                  {.step = 2, .clip_norm = 1.0f, .updates = 2});
  made.trial->engine().update();
  made.trial->engine().result();
  const std::string changed = first_difference(made.trial->all("master"), before);
  need(changed.empty(), "master weights of " + changed + " after a step at rate 0", "changed", "as before");
  return "";
}

/// Sums of gradients that are `factor`, a power of two, times as large over as many times the tokens are the same mean.
State after_scaled_sums(const Subject& subject, const Model& model, float factor) {
  Made made = fresh(subject, model);
  made.trial->train(0, 1);
  Engine& engine = made.trial->engine();
  engine.micro_step(random_batch({4, 8}, model.traits().vocabulary, 9),
                    {.step = 1, .learning_rate = 1e-2f, .clip_norm = 1.0f, .updates = 1});
  for (const PlannedTensor& tensor : made.trial->plan().tensors) {
    if (tensor.kind != "gradient") continue;
    std::vector<float> sums = made.trial->tensor("gradient", tensor.parameter, tensor.layer);
    for (float& sum : sums) sum *= factor;
    made.trial->write("gradient", tensor.parameter, tensor.layer, sums);
  }
  const PlannedTensor& stats_tensor = made.trial->plan().tensor("loss_stats", "", -1);
  LossStats stats;
  engine.read(stats_tensor, &stats);
  stats.valid_tokens *= factor;
  engine.write(stats_tensor, &stats);
  engine.update();
  engine.result();
  return made.trial->state();
}

std::string scales_gradients(const Subject& subject, const Model& model) {
  const State want = after_scaled_sums(subject, model, 1);
  for (float factor : {0x1p-4f, 2.0f, 0x1p10f}) {
    const std::string differs = first_difference(after_scaled_sums(subject, model, factor), want);
    need(differs.empty(),
         differs + " after gradient sums " + number(factor) + " times as large, gradient_scale divided", "other bits",
         "the same");
  }
  return "";
}

std::string optimizer_resumes(const Subject& subject, const Model& model) {
  std::vector<Made> made;
  made.reserve(4);
  return resumes([&] {
    made.push_back(fresh(subject, model));
    return std::move(made.back().trial);
  });
}

std::string factors(const Subject& subject) {
  for (std::int64_t steps : {1, 2, 7, 1000, 1'000'000}) {
    auto schedule = subject.make<Schedule>(), other = subject.make<Schedule>();
    std::int64_t stride = std::max<std::int64_t>(1, steps / 997);
    for (std::int64_t i = 0; i < steps; i += stride) {
      const std::int64_t step = steps - 1 - i;  // backwards: a factor depends on the step alone
      const double factor = schedule->factor(step, steps);
      const std::string where = "factor of step " + std::to_string(step) + " of " + std::to_string(steps);
      need(std::isfinite(factor) && factor >= 0 && factor <= 1, where, number(factor), "from 0 to 1");
      need(other->factor(step, steps) == factor && schedule->factor(step, steps) == factor, where + ", asked again",
           "another number", number(factor));
    }
  }
  return "";
}

}  // namespace

void check_optimizer(Report& report, const Subject& subject) {
  const testkit::TinyModel model;
  report.contract("learns", [&] { return learns(subject, model); });
  report.contract("learning rate", [&] { return keeps_to_rate(subject, model); });
  report.contract("gradient scale", [&] { return scales_gradients(subject, model); });
  report.contract("skips", [&] { return skips(subject, model); });
  report.contract("save and restore", [&] { return optimizer_resumes(subject, model); });
}

void check_schedule(Report& report, const Subject& subject) {
  report.contract("factors", [&] { return factors(subject); });
}

}  // namespace quern::conformance
