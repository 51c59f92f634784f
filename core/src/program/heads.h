#pragma once
// What planning and the kit ask of the attention heads that a model states for a projection.

#include <string>

#include "quern/parameter.h"

namespace quern {

/// What is wrong with ParameterPart::heads: "do not have the part's rows". Empty: nothing, or there are none.
std::string heads_fault(const ParameterPart& part);

}  // namespace quern
