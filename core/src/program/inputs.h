#pragma once
// Inputs that the programs of a model declare, and the sums of losses that they add to.

#include <vector>

#include "quern/op_spec.h"

namespace quern {

/// A config error unless both values declare the same input; a bound that one of them lacks is the other's.
void need_same_input(Value& known, const Value& declared);

/// Inputs of a micro-batch that programs declare, each once; without the run's own, "step".
std::vector<Value> declared_inputs(const std::vector<const Program*>& programs);

/// Adds losses (and targets) to the step's sums, the state "loss_stats".
void append_loss_stats(Program& program, const OpSet& ops, std::vector<ValueId> inputs, Attributes attributes = {});

}  // namespace quern
