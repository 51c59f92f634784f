// Lion: Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023). One state, and steps of one size: its rate
// is a third to a tenth of AdamW's, and its weight decay as many times larger.
#include "optimizer/optimizers.h"
#include "quern/options.h"

namespace quern {

namespace {

struct LionOptions {
  double beta1 = 0.9;
  double beta2 = 0.99;
  double weight_decay = 0.5;
  std::string moments = "fp32";
};

OptionTable<LionOptions> lion_options() {
  OptionTable<LionOptions> t;
  t.add("beta1", &LionOptions::beta1, "share of the moment in the step's direction").at_least(0).at_most(0.9999999);
  t.add("beta2", &LionOptions::beta2, "decay of the moment").at_least(0).at_most(0.9999999);
  t.add("weight_decay", &LionOptions::weight_decay, "shrinks matrices by this times the learning rate a step")
      .at_least(0);
  t.add("moments", &LionOptions::moments, "dtype of the moment; bf16 rounds stochastically").one_of({"fp32", "bf16"});
  return t;
}

class Lion final : public Optimizer {
 public:
  explicit Lion(LionOptions options) : options_(std::move(options)) {}

  std::vector<OptimizerState> states(const ParameterSpec& parameter) const override {
    return {OptimizerState::elements(parameter, "moment1", *dtype_named(options_.moments))};
  }
  void update(UpdateBuilder& b, const ParameterSpec& parameter) const override {
    b.op("lion", {b.update(), b.step(), b.gradient(), b.master(), b.state("moment1")}, "",
         {{"beta1", options_.beta1},
          {"beta2", options_.beta2},
          {"weight_decay", parameter.decay ? options_.weight_decay : 0.0},
          {"rate", parameter.rate}});
  }

 private:
  LionOptions options_;
};

}  // namespace

void add_lion(Manifest& manifest) {
  manifest.add<Optimizer>("lion", "Lion: the sign of a moment", lion_options().specs(), [](const OptionValues& values) {
    return std::make_unique<Lion>(lion_options().bind(values));
  });
}

}  // namespace quern
