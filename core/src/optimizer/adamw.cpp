#include "optimizer/adamw.h"

#include "optimizer/optimizers.h"
#include "quern/error.h"
#include "quern/options.h"

namespace quern {

namespace {

OptionTable<AdamWOptions> adamw_options() {
  OptionTable<AdamWOptions> t;
  t.add("beta1", &AdamWOptions::beta1, "decay of the first moment").at_least(0).at_most(0.9999999);
  t.add("beta2", &AdamWOptions::beta2, "decay of the second moment").at_least(0).at_most(0.9999999);
  t.add("eps", &AdamWOptions::eps, "added to the root of the second moment").above(0);
  t.add("weight_decay", &AdamWOptions::weight_decay, "shrinks matrices by this times the learning rate a step")
      .at_least(0);
  t.add("moments", &AdamWOptions::moments, "dtype of both moments; bf16 rounds stochastically")
      .one_of({"fp32", "bf16"});
  return t;
}

}  // namespace

std::vector<OptimizerState> AdamW::states(const ParameterSpec& parameter) const {
  auto dtype = dtype_named(options_.moments);
  if (!dtype) fail_internal("adamw", "moments of unknown dtype " + options_.moments);
  return {OptimizerState::elements(parameter, "moment1", *dtype),
          OptimizerState::elements(parameter, "moment2", *dtype)};
}

void AdamW::update(UpdateBuilder& b, const ParameterSpec& parameter) const {
  Attributes attributes{{"beta1", options_.beta1},
                        {"beta2", options_.beta2},
                        {"eps", options_.eps},
                        {"weight_decay", parameter.decay ? options_.weight_decay : 0.0}};
  if (parameter.rate != 1) attributes.set("rate", parameter.rate);
  b.op("adamw", {b.update(), b.step(), b.gradient(), b.master(), b.state("moment1"), b.state("moment2")}, "",
       std::move(attributes));
}

void add_adamw(Manifest& manifest) {
  manifest.add<Optimizer>(
      "adamw", "AdamW, with moments in fp32 or bf16", adamw_options().specs(),
      [](const OptionValues& values) { return std::make_unique<AdamW>(adamw_options().bind(values)); });
}

}  // namespace quern
