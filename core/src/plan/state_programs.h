#pragma once
// Programs over a run's state rather than its activations: the norm of the gradients, the optimizer's update, the
// working forms of a weight, and what precision states do at the end of a step.

#include <string>
#include <vector>

#include "plan/program_set.h"

namespace quern {

/// A tensor of one layer, as programs over all layers name it: "gradient.qkv.weight.3"; no number for layer -1.
std::string tensor_name(const std::string& kind, const std::string& parameter, int layer);

class StatePrograms {
 public:
  /// All arguments outlive it.
  StatePrograms(const PlanParts& parts, const PlanOptions& options, const ProgramSet& set)
      : parts_(parts), options_(options), set_(set), layers_(static_cast<int>(parts.model.traits().layers)) {}

  Program norm() const;
  Program update() const;
  /// Makes every working form of a parameter that programs of `stages` read.
  Program refresh(const ParameterSpec& spec, const std::vector<const Stage*>& stages) const;
  static Program advance(const Stage& stage);

 private:
  ValueId add_tensor(Program& program, const std::string& kind, const ParameterSpec& spec, int layer,
                     DType dtype) const;

  const PlanParts& parts_;
  const PlanOptions& options_;
  const ProgramSet& set_;
  int layers_;
};

}  // namespace quern
