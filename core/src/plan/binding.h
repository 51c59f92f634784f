#pragma once
// Where a program's values are in the device arena when it runs at a given place of the model.

#include <cstdint>

#include "plan/plan.h"

namespace quern {

/// A place where a program runs.
struct Site {
  enum class Pass : std::uint8_t { forward, backward, evaluate } pass = Pass::forward;
  int layer = -1;         ///< -1 outside the layers
  int boundary_in = -1;   ///< number of the boundary whose stream (forward) or gradient (backward) enters; -1: none
  int boundary_out = -1;  ///< likewise for what leaves
};

/// Offset of a value in the arena; -1 for an absent operand or an output that nobody reads.
std::int64_t offset_of(const Plan& plan, const PlacedProgram& placed, ValueId id, const Site& site);

}  // namespace quern
