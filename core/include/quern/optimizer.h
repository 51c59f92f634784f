#pragma once
// An optimizer names its state tensors and the op that updates one parameter; the core builds the update program,
// shards it and places its state.

#include <string>
#include <vector>

#include "quern/attributes.h"
#include "quern/parameter.h"

namespace quern {

struct OptimizerState {
  std::string name;  ///< "moment1"
  DType dtype = DType::f32;
};

/// The op that updates one parameter. Its inputs are gradient, master, the states in order, "update" and "step"; its
/// outputs are the new master and states, in place.
struct UpdateOp {
  std::string kind;
  Attributes attributes;
};

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  virtual std::vector<OptimizerState> states() const = 0;
  virtual UpdateOp update(const ParameterSpec& parameter) const = 0;
};

/// Learning-rate schedule: a pure function of the step.
class Schedule {
 public:
  virtual ~Schedule() = default;
  /// Factor on the peak rate for step `step` of `steps`, from 0; the last step gets the final fraction exactly.
  virtual double factor(std::int64_t step, std::int64_t steps) const = 0;
};

}  // namespace quern
