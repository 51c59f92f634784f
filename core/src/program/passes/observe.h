#pragma once
// Pass 3b, observe, where the plan asks for it: beside every op that brings a tensor to 8 bits, an op that tells what
// its scales lose. Nothing else reads what these make, so that no value changes, and steps that do not observe leave
// them out.

#include <string>
#include <vector>

#include "quern/op_spec.h"

namespace quern {

/// In a lowered program of training.
void observe_scales(Program& program, const OpSet& ops);

/// A program that observes the quantized working copies which the program `refresh` makes from a parameter's master.
Program observe_copies(const Program& refresh, const OpSet& ops);

/// The ops that run in steps that do not observe, and the values that are read then: as if the program had
/// been planned without observations.
struct Unobserved {
  std::vector<bool> runs, read;
};
Unobserved without_observations(const Program& program);

/// The name of the observed tensor's quantized values, from the observation's.
std::string observed_tensor(const Value& observation);

}  // namespace quern
