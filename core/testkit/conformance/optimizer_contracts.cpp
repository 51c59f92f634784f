// Of optimizers and schedules, on a small model on the oracle.
#include <cmath>

#include "conformance/contracts.h"
#include "conformance/trial.h"
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
  for (state.step = 0; state.step < 30; ++state.step) {
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
  report.contract("skips", [&] { return skips(subject, model); });
  report.contract("save and restore", [&] { return optimizer_resumes(subject, model); });
}

void check_schedule(Report& report, const Subject& subject) {
  report.contract("factors", [&] { return factors(subject); });
}

}  // namespace quern::conformance
