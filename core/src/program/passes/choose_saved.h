#pragma once
// Pass 4, choose saved: splits a lowered joint program into a forward program, which keeps some of its values, and a
// backward program, which recomputes the others it needs. Which ones are kept changes no bit of the gradients,
// unless a device fuses a matmul in one half only (fuse.h).

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "program/passes/differentiate.h"

namespace quern {

/// The recomputed values, by the field's names; several may be combined.
/// swiglu: gated activations; norm: outputs of norms; ffn: the feed-forward's first matmuls and activations;
/// qkv: what attention reads; att: that and the attention output; block: everything but what enters the block.
inline const std::vector<std::string> kRecomputeNames = {"swiglu", "norm", "ffn", "qkv", "att", "block"};

/// The forward and backward halves. Values that cross have one name and role saved in both.
struct PartitionedProgram {
  Program forward;
  Program backward;  ///< recomputation first, then the backward ops; inputs: the gradient; outputs: likewise
  std::vector<std::string> saved;  ///< names of the values that cross, in order of their making
};

/// Names of the forward values to recompute under `recompute` (names of kRecomputeNames).
std::set<std::string> recomputed_values(const JointProgram& joint, const OpSet& ops,
                                        const std::vector<std::string>& recompute);

/// Splits so that forward values in `recomputed` are not kept if that can be helped: what enters from the neighbouring
/// program cannot be recomputed, so a sum of boundary values, or the boundary value itself, is kept when needed.
PartitionedProgram partition(const JointProgram& joint, const OpSet& ops, const std::set<std::string>& recomputed);

/// Sets to recompute, from everything to as little as helps: each keeps, of what the one before recomputes, the values
/// that save most of `backward_seconds` per byte. `bytes` gives a value's size.
std::vector<std::set<std::string>> recompute_path(const JointProgram& joint, const OpSet& ops,
                                                  const std::function<double(const Value&)>& bytes,
                                                  const std::function<double(const Program&)>& backward_seconds);

}  // namespace quern
