#pragma once
// Runs matrices of one shape together: ops of an update that take stacks (over_norm, stacked_matmul) are emitted for
// one matrix each, and a small matmul leaves most of a GPU idle.

#include "quern/op_spec.h"

namespace quern {

/// The update with equal chains of such ops joined, of as many matrices as make `bytes` of a chain's largest value; at
/// least one. A matrix's result does not depend on the stack that it is in. muon_apply and row_factors take their
/// matrix out of a stack; a chain that another op reads stays a stack of one. Values keep their ids; values of chains
/// that joined others' are unused.
Program stack_matrices(Program update, std::int64_t bytes);

/// Of a stack: enough matrices to fill a large GPU, and little beside a step's activations.
inline constexpr std::int64_t kStackBytes = std::int64_t{64} << 20;

}  // namespace quern
