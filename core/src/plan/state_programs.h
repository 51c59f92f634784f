#pragma once
// Programs over a run's state rather than its activations: the norm of the gradients, the optimizer's update, the
// working forms of a weight, and what precision states do at the end of a step.

#include <functional>
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

  /// The norm of all gradients, and what it is clipped by.
  Program norm() const;
  /// The same in two parts, for gradients that are not all on the device at once: the sums of squares of a layer's, -1
  /// for those outside, and what adds up all of these.
  Program squares(int layer) const;
  Program norm_of_squares() const;
  /// The tensor that these sums are in.
  static std::string squares_name(int layer);
  /// Updates every tensor; or those of a layer alone, -1 for those outside.
  Program update() const {
    return update([](int) { return true; });
  }
  Program update(int layer) const {
    return update([layer](int wanted) { return wanted == layer; });
  }
  /// Makes every working form of a parameter that programs of `stages` read.
  Program refresh(const ParameterSpec& spec, const std::vector<const Stage*>& stages) const;
  static Program advance(const Stage& stage);

 private:
  Program update(const std::function<bool(int)>& takes_layer) const;
  Op squares_of(Program& program, int first, int last) const;
  static void add_clip(Program& program, const std::vector<ValueId>& sums);
  /// f64 elements, one for each tensor of the layer.
  Value squares_value(int layer) const;
  ValueId add_tensor(Program& program, const std::string& kind, const ParameterSpec& spec, int layer,
                     DType dtype) const;

  const PlanParts& parts_;
  const PlanOptions& options_;
  const ProgramSet& set_;
  int layers_;
};

}  // namespace quern
