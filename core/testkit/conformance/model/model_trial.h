#pragma once
// Trainings of the model under test, for its contracts. fp32 on the oracle unless a precision is given.

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "conformance/harness/trial.h"

namespace quern::conformance {

struct ModelTrial {
  std::unique_ptr<Device> device;
  std::unique_ptr<Model> model;
  std::unique_ptr<Trial> trial;
};

/// A trial of the model, or of `changed`, everything in it new. `precision` outlives it.
ModelTrial fresh_trial(const Subject& subject, const PrecisionBackend* precision = nullptr,
                       const std::vector<std::string>& recompute = {}, bool documents = false,
                       std::unique_ptr<Model> changed = nullptr);

Batch batch_for(Trial& trial, std::uint64_t seed);

/// Null if the plan uploads no such input.
const Value* input_named(const Plan& plan, std::string_view name);

/// Whether an option is the number of layers, by Hugging Face's names.
bool is_depth(const std::string& key);

}  // namespace quern::conformance
