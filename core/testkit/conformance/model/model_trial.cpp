#include "conformance/model/model_trial.h"

#include <algorithm>

namespace quern::conformance {

ModelTrial fresh_trial(const Subject& subject, const PrecisionBackend* precision,
                       const std::vector<std::string>& recompute, bool documents, std::unique_ptr<Model> changed) {
  ModelTrial made{oracle(subject.host), changed ? std::move(changed) : subject.make<Model>(), nullptr};
  PlanOptions options;
  options.geometry = {3, std::min<std::int64_t>(7, made.model->traits().max_positions)};
  options.recompute = recompute;
  options.documents = documents;
  made.trial =
      std::make_unique<Trial>(subject.host, TrialParts{*made.model, *made.device, precision, nullptr}, options);
  return made;
}

Batch batch_for(Trial& trial, std::uint64_t seed) { return random_batch(trial.plan(), seed); }

const Value* input_named(const Plan& plan, std::string_view name) {
  for (const Value& input : plan.uploaded)
    if (input.name == name) return &input;
  return nullptr;
}

bool is_depth(const std::string& key) {
  return key == "num_hidden_layers" || key == "n_layer" || key == "num_layers" || key == "depth";
}

}  // namespace quern::conformance
