#pragma once
// AdamW: Loshchilov & Hutter, "Decoupled Weight Decay Regularization" (2019). Matrices decay, norms and biases do not.

#include <string>
#include <vector>

#include "quern/optimizer.h"
#include "quern/options.h"

namespace quern {

struct AdamWOptions {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
  std::string moments = "fp32";
  std::string moment1 = {}, moment2 = {};  ///< empty: as `moments`
  std::int64_t block = 128;
};

/// What optimizers that have AdamW in them share; `T` is AdamWOptions or has it as a base.
template <class T>
void add_adamw_rule(OptionTable<T>& t) {
  t.add("beta1", &AdamWOptions::beta1, "AdamW's decay of the first moment").at_least(0).at_most(0.9999999);
  t.add("beta2", &AdamWOptions::beta2, "AdamW's decay of the second moment").at_least(0).at_most(0.9999999);
  t.add("eps", &AdamWOptions::eps, "AdamW's addend to the root of the second moment").above(0);
  t.add("weight_decay", &AdamWOptions::weight_decay, "shrinks matrices by this times the learning rate a step")
      .at_least(0);
}

class AdamW final : public Optimizer {
 public:
  explicit AdamW(const AdamWOptions& options);
  std::vector<OptimizerState> states(const ParameterSpec& parameter) const override;
  void update(UpdateBuilder& b, const ParameterSpec& parameter) const override;

 private:
  /// Whether moments of the parameter are in 8 bits: of matrices.
  bool in_8bit(const ParameterSpec& parameter) const;

  AdamWOptions options_;
  DType dtypes_[2];
};

}  // namespace quern
