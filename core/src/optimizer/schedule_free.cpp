// Schedule-free AdamW: Defazio et al., "The Road Less Scheduled" (2024). Gradients are taken at the masters, which are
// between AdamW's iterates and their average; evaluations and exports use the average, so the rate need not decay.
#include "optimizer/optimizers.h"
#include "quern/options.h"

namespace quern {

namespace {

struct ScheduleFreeOptions {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
};

OptionTable<ScheduleFreeOptions> schedule_free_options() {
  OptionTable<ScheduleFreeOptions> t;
  t.add("beta1", &ScheduleFreeOptions::beta1, "share of the average in the masters, where gradients are taken")
      .at_least(0)
      .at_most(0.9999);
  t.add("beta2", &ScheduleFreeOptions::beta2, "decay of the second moment").at_least(0).at_most(0.9999999);
  t.add("eps", &ScheduleFreeOptions::eps, "addend to the root of the second moment").above(0);
  t.add("weight_decay", &ScheduleFreeOptions::weight_decay, "shrinks matrices by this times the learning rate a step")
      .at_least(0);
  return t;
}

class ScheduleFree final : public Optimizer {
 public:
  explicit ScheduleFree(const ScheduleFreeOptions& options) : options_(options) {}

  std::vector<OptimizerState> states(const ParameterSpec& parameter) const override {
    OptimizerState average = OptimizerState::elements(parameter, "average", DType::f32);
    average.evaluated = true;
    return {std::move(average), OptimizerState::elements(parameter, "iterate", DType::f32),
            OptimizerState::elements(parameter, "moment2", DType::f32)};
  }
  void update(UpdateBuilder& b, const ParameterSpec& parameter) const override {
    b.op("schedule_free",
         {b.update(), b.step(), b.gradient(), b.master(), b.state("average"), b.state("iterate"), b.state("moment2")},
         "",
         {{"beta1", options_.beta1},
          {"beta2", options_.beta2},
          {"eps", options_.eps},
          {"weight_decay", parameter.decay ? options_.weight_decay : 0.0},
          {"rate", parameter.rate}});
  }

 private:
  ScheduleFreeOptions options_;
};

}  // namespace

void add_schedule_free(Manifest& manifest) {
  manifest.add<Optimizer>(
      "schedule_free", "schedule-free AdamW: evaluates the average of its iterates", schedule_free_options().specs(),
      [](const OptionValues& values) { return std::make_unique<ScheduleFree>(schedule_free_options().bind(values)); });
}

}  // namespace quern
