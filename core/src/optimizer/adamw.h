#pragma once
// AdamW: Loshchilov & Hutter, "Decoupled Weight Decay Regularization" (2019). Matrices decay, norms and biases do not.

#include <vector>

#include "quern/optimizer.h"
#include "quern/plugin.h"

namespace quern {

struct AdamWOptions {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
  std::string moments = "fp32";
};

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
