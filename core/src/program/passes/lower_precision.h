#pragma once
// Pass 3, lower precision: asks the precision backend to replace every linear's matmuls by explicit quantize,
// transpose and matmul ops on a joint program.

#include <string>
#include <vector>

#include "program/passes/differentiate.h"
#include "quern/precision.h"

namespace quern {

/// A working copy of a parameter that the lowering asked for, beyond the one in the working dtype: made from the master
/// weights once per optimizer step by `op`, whose first input is the master.
struct WorkingCopy {
  std::string parameter;
  std::string kind;
  Attributes attributes;
  std::vector<Value> values;  ///< the op's outputs, as the program has them
};

struct LoweredProgram {
  JointProgram joint;
  std::vector<WorkingCopy> working_copies;
};

LoweredProgram lower_precision(JointProgram joint, const OpSet& ops, const PrecisionBackend& backend);

}  // namespace quern
