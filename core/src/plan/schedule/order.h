#pragma once
// The order of programs: the one place that says what runs after what in a step, an evaluation or an update. Memory is
// laid out and schedules are made from it.

#include <cstdint>
#include <string_view>
#include <vector>

#include "plan/plan.h"

namespace quern {

/// What ranks do together.
enum class Meeting : std::uint8_t {
  none,
  gather,     ///< brings the working copies of a group or layer here, beside what follows
  reduce,     ///< sums the gradients of the matrices of a group or layer, beside what follows
  sum,        ///< adds up all other gradients
  sum_norms,  ///< adds up losses and squares
  states,     ///< the maximum of the states that the update advances
  amaxes,     ///< the maximum of the masters' amaxes: a window's or, with those states, all
};

/// A program, or an action of all ranks, at its place in the order. Boundary k is before layer k; the last one is
/// before the head.
struct Stop {
  /// Which streams enter and leave.
  enum class Flow : std::uint8_t {
    none,      ///< works on state alone
    forward,   ///< takes the residual stream of boundary_in, leaves boundary_out's
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
  Meeting meeting = Meeting::none;
  ParameterGroup group = ParameterGroup::block;  ///< of a collective
  bool joins = false;                            ///< takes values of stores together with the stop before it
  int window = -1;                               ///< number of those that do, in the order
  RowSlice rows = {};                            ///< the rows of its parameter that the program is for
  const UpdateWindow* update = nullptr;          ///< the window whose amaxes these are; null: all
  const ParameterPlan* loads = nullptr;          ///< instead of a program: the host writes its master
  std::int64_t locals = 0;  ///< where its program's local values begin, from Plan::transient_offset on (run_memory.h)
};

/// Borrows the plan's programs. Empty for runs that are no programs, and for those that the plan has no programs of.
std::vector<Stop> order_of(const Plan& plan, const Run& run);

}  // namespace quern
