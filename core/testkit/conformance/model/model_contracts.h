#pragma once
// Contracts of models that are files of their own. Each returns what it measured, or throws Broken.

#include <string>

#include "conformance/report.h"
#include "conformance/subject.h"

namespace quern::conformance {

/// hf_config() has every option, whatever its value, and each value makes programs that fit together.
std::string check_own_config(const Subject& subject, const Model& model);

/// Each parameter's gradient against finite differences of the loss.
std::string check_gradients(const Subject& subject);
/// The same of models with other values of an option, one at a time, and of one and three layers.
std::string check_gradients_of_variants(const Subject& subject);
/// What trains has the gradients that it has without frozen ones beside it, and these have none.
std::string check_frozen(const Subject& subject);
/// Gradients of LoRA of all linears of the layers.
std::string check_adapters(const Subject& subject);

/// No loss depends on other rows; of a causal model none depends on later tokens, or on other documents of its row.
std::string check_causal(const Subject& subject);

}  // namespace quern::conformance
