#pragma once
// AdamW: Loshchilov & Hutter, "Decoupled Weight Decay Regularization" (2019). Matrices decay, norms and biases do not.

#include <string>
#include <vector>

#include "quern/optimizer.h"

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
  std::vector<OptimizerState> states(const ParameterSpec& parameter) const override;
  void update(UpdateBuilder& b, const ParameterSpec& parameter) const override;

 private:
  AdamWOptions options_;
};

}  // namespace quern
