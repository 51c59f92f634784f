#pragma once
// An optimizer names its state tensors and the op that updates one parameter; the core builds the update program,
// shards it and places its state.

#include <cstdint>
#include <string>
#include <vector>

#include "quern/attributes.h"
#include "quern/parameter.h"

namespace quern {

struct OptimizerState {
  std::string name;  ///< "moment1"
  DType dtype = DType::f32;
};

/// What an element of a tensor's new master and states may depend on, beside "update", "step" and the tensor's entries
/// of "objects" and "offsets".
enum class UpdateLocality : std::uint8_t {
  element,  ///< the same element of the gradient, the master and the states
  row,      ///< the same row of these
  matrix,   ///< all of these
};

/// The op that updates a parameter, together with all parameters of an equal op. Its inputs are "update", "step" and
/// then, for each tensor, the gradient, the master and the states in order; its outputs are each tensor's new master
/// and states, in place. The core adds number lists, one entry per tensor: "objects", a random key, and "offsets", the
/// global index of its first element.
struct UpdateOp {
  std::string kind;
  Attributes attributes;
  /// Unless it is `matrix`, the core may run the op on some rows of a parameter: on a rank's shard, or in windows.
  UpdateLocality locality = UpdateLocality::matrix;
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
