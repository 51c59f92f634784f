// SGD with momentum, as torch.optim.SGD: weight decay is added to the gradient.
#include "optimizer/optimizers.h"
#include "quern/options.h"

namespace quern {

namespace {

struct SgdOptions {
  double momentum = 0.9;
  bool nesterov = false;
  double weight_decay = 0;
  std::string moments = "fp32";
};

OptionTable<SgdOptions> sgd_options() {
  OptionTable<SgdOptions> t;
  t.add("momentum", &SgdOptions::momentum, "decay of the sum of gradients").at_least(0).at_most(0.9999999);
  t.add("nesterov", &SgdOptions::nesterov, "steps along the gradient plus momentum times the new sum");
  t.add("weight_decay", &SgdOptions::weight_decay, "this times a matrix is added to its gradient").at_least(0);
  t.add("moments", &SgdOptions::moments, "dtype of the sum; bf16 rounds stochastically").one_of({"fp32", "bf16"});
  return t;
}

class Sgd final : public Optimizer {
 public:
  explicit Sgd(SgdOptions options) : options_(std::move(options)) {}

  std::vector<OptimizerState> states(const ParameterSpec& parameter) const override {
    return {OptimizerState::elements(parameter, "moment1", *dtype_named(options_.moments))};
  }
  void update(UpdateBuilder& b, const ParameterSpec& parameter) const override {
    b.op("sgd", {b.update(), b.step(), b.gradient(), b.master(), b.state("moment1")}, "",
         {{"momentum", options_.momentum},
          {"nesterov", std::int64_t{options_.nesterov}},
          {"weight_decay", parameter.decay ? options_.weight_decay : 0.0},
          {"rate", parameter.rate}});
  }

 private:
  SgdOptions options_;
};

}  // namespace

void add_sgd(Manifest& manifest) {
  manifest.add<Optimizer>("sgd", "SGD with momentum", sgd_options().specs(),
                          [](const OptionValues& values) { return std::make_unique<Sgd>(sgd_options().bind(values)); });
}

}  // namespace quern
