#pragma once
// Pass 2, differentiate: appends the backward ops to a program. The result is one joint program, forward ops first, in
// which backward ops read forward values directly; which of those are kept and which recomputed is decided later.

#include <functional>
#include <string>

#include "quern/op_spec.h"

namespace quern {

struct JointProgram {
  Program program;                  ///< inputs and outputs are the forward ones
  ValueId gradient_in = kNoValue;   ///< gradient of the stream that the program hands on; none for the head
  ValueId gradient_out = kNoValue;  ///< gradient of the stream that it takes; none for the embedding
  bool trains = false;              ///< makes a gradient
};

/// The gradients to make: of parameters, and of the stream that a program takes, if anything before it trains.
struct WantedGradients {
  std::function<bool(const std::string& parameter)> trainable = {};  ///< empty: all
  bool of_input = true;
};

/// `activation` is the dtype of activation gradients, `gradient` the dtype of parameter gradients. All outputs receive
/// the same gradient (after rotation they are the operands of one sum), and all inputs must come out with one and the
/// same. Only what the wanted gradients follow from is appended. On their path, an op that has no backward, or states
/// no gradient of an operand, is a config error.
JointProgram differentiate(const Program& forward, const OpSet& ops, DType activation, DType gradient,
                           const WantedGradients& wanted = {});

}  // namespace quern
