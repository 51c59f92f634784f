#pragma once
// The order of programs: the one place that says what runs after what in a step, an evaluation or an update. Memory is
// laid out and schedules are made from it.

#include <cstdint>
#include <string_view>
#include <vector>

#include "plan/plan.h"

namespace quern {

/// A program at its place in the order. Boundary k lies before layer k; the last one lies before the head.
struct Stop {
  /// Which streams enter and leave.
  enum class Flow : std::uint8_t {
    none,      ///< works on state alone
    forward,   ///< takes the stream of boundary_in, leaves that of boundary_out
    turn,      ///< takes the stream, leaves its gradient
    backward,  ///< takes and leaves gradients
    evaluate,  ///< as forward, but keeps nothing
  };
  const PlacedProgram* program = nullptr;
  Flow flow = Flow::none;
  int layer = -1;                ///< -1 outside the layers
  int boundary_in = -1;          ///< -1: nothing enters
  int boundary_out = -1;         ///< -1: nothing leaves
  std::string_view result = {};  ///< the tensor that the program's output is, instead of a stream
  int window = -1;               ///< its number in the order; programs that take values of stores together share one
};

/// Borrows the plan's programs. Empty for runs that are no programs, and for those that the plan has no programs of.
std::vector<Stop> order_of(const Plan& plan, Run run);

}  // namespace quern
