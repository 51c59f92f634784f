#pragma once
// AdamW: Loshchilov & Hutter, "Decoupled Weight Decay Regularization" (2019). Matrices decay, norms and biases do not.

#include <vector>

#include "quern/optimizer.h"
#include "quern/options.h"
#include "quern/plugin.h"

namespace quern {

struct AdamWOptions {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
  std::string moments = "fp32";
};

inline OptionTable<AdamWOptions> adamw_options() {
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

class AdamW final : public Optimizer {
 public:
  explicit AdamW(const AdamWOptions& options) : options_(options) {}
  std::vector<OptimizerState> states() const override;
  UpdateOp update(const ParameterSpec& parameter) const override;

 private:
  AdamWOptions options_;
};

/// The built-in optimizers, for the plugin host.
std::vector<Factory> optimizer_factories();

}  // namespace quern
