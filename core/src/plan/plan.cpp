#include "plan/plan.h"

#include "quern/error.h"

namespace quern {

std::string_view name_of(TensorOwner owner) {
  switch (owner) {
    case TensorOwner::master: return "master weights";
    case TensorOwner::working: return "working weights";
    case TensorOwner::gradient: return "gradients";
    case TensorOwner::optimizer: return "optimizer state";
    case TensorOwner::precision: return "precision state";
    case TensorOwner::input: return "inputs";
    case TensorOwner::observation: return "observations";
    case TensorOwner::result: return "results";
  }
  return "?";
}

std::vector<PlannedTensor> training_state(const Plan& plan) {
  std::vector<PlannedTensor> state;
  for (const PlannedTensor& tensor : plan.tensors) {
    bool weights = tensor.kind == "master" || tensor.owner == TensorOwner::optimizer;
    if (weights || tensor.owner == TensorOwner::precision) state.push_back(tensor);
  }
  return state;
}

const PlannedTensor* Plan::find(std::string_view kind, std::string_view parameter, int layer) const {
  for (const std::vector<PlannedTensor>* list : {&tensors, &aliases})
    for (const PlannedTensor& tensor : *list)
      if (tensor.layer == layer && tensor.kind == kind && tensor.parameter == parameter) return &tensor;
  return nullptr;
}

const PlannedTensor& Plan::tensor(std::string_view kind, std::string_view parameter, int layer) const {
  if (const PlannedTensor* found = find(kind, parameter, layer)) return *found;
  fail_internal("plan", "no tensor " + std::string(kind) + " of `" + std::string(parameter) + "`, layer " +
                            std::to_string(layer));
}

}  // namespace quern
