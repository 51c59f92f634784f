#pragma once
// [[train.groups]]: which parameters train, at which rate, by which optimizer, and with weight decay.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "quern/model.h"

namespace quern {

struct TrainRule {
  std::string where;               ///< of its patterns in the config, for errors
  std::vector<std::string> match;  ///< patterns of quern's names, or of tensors in a Hugging Face file
  std::optional<bool> trainable = {}, decay = {};
  std::optional<double> rate = {};
  std::optional<std::string> optimizer = {};
  std::optional<double> deviation = {};  ///< of initial values that are random; 0: zeros
};

/// The model with these rules for its parameters; of several that match, the last decides. A pattern that matches
/// nothing, or some tensors of a parameter and not the others, is a config error.
std::unique_ptr<Model> with_rules(std::unique_ptr<Model> model, const std::vector<TrainRule>& rules);

}  // namespace quern
