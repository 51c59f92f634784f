#pragma once
// Pass 2, differentiate: appends the backward ops to a program. The result is one joint program, forward ops first, in
// which backward ops read forward values directly; which of those are kept and which recomputed is decided later.

#include "quern/op_spec.h"

namespace quern {

struct JointProgram {
  Program program;                  ///< inputs and outputs are the forward ones
  ValueId gradient_in = kNoValue;   ///< gradient of the stream that the program hands on; none for the head
  ValueId gradient_out = kNoValue;  ///< gradient of the stream that it takes; none for the embedding
};

/// `activation` is the dtype of activation gradients, `gradient` the dtype of parameter gradients. All outputs receive
/// the same gradient (after rotation they are the operands of one sum), and all inputs must come out with one and the
/// same. An op that has no backward, on the path of a gradient, is a config error.
JointProgram differentiate(const Program& forward, const OpSet& ops, DType activation, DType gradient);

}  // namespace quern
