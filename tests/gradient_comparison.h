#pragma once
// Gradients of one micro-batch at the same weights under several precisions: how much a recipe turns and scales them.
// Behind the program gradient_table, and a test with bounds.

#include <map>
#include <string>
#include <vector>

#include "config/document.h"
#include "quern/data_source.h"

namespace quern::testing {

/// A precision, as overrides of a config.
struct GradientRecipe {
  std::string name;
  std::vector<std::string> overrides;
};

/// fp32 and bf16, then e4m3 and e5m2 in their modes.
std::vector<GradientRecipe> gradient_recipes();

/// By parameter, a tensor for each layer.
using ParameterTensors = std::map<std::string, std::vector<std::vector<float>>>;

class GradientProbe {
 public:
  /// Trains what the config says for `steps` steps in fp32; its later batches are then the probe's.
  GradientProbe(const ConfigDocument& config, std::int64_t steps);

  /// Parameters in the model's order.
  const std::vector<std::string>& parameters() const { return parameters_; }
  double loss() const { return loss_; }  ///< of the last step, nats a token

  enum class Measured { batch, another };
  /// Gradients of one batch, or of another one, at the trained weights. More batches fill amax histories first, with
  /// updates of rate zero, so that delayed scales come from data that they are not applied to.
  ParameterTensors gradients(const GradientRecipe& recipe, Measured measured = Measured::batch) const;

 private:
  ConfigDocument config_;
  std::vector<std::string> parameters_;
  ParameterTensors masters_;
  std::vector<Batch> batches_;
  double loss_ = 0;
};

struct Agreement {
  double cosine = 0;      ///< of all layers' elements as one vector
  double norm_ratio = 0;  ///< its norm over the reference's
  double least = 0;       ///< least cosine of one layer's tensor
};
Agreement agreement(const std::vector<std::vector<float>>& got, const std::vector<std::vector<float>>& reference);

}  // namespace quern::testing
