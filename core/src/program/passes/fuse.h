#pragma once
// Pass 5, fuse: replaces groups of ops by fused forms that the device offers (see Fusion in device.h) and takes at the
// plan's sizes; where it refuses, the parts stay. A fused form keeps all results of its parts and rounds each at its
// dtype, so it changes no bit, but where it has a matmul in it, which may sum in another order. Results that
// no op reads are never written.

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "quern/device.h"
#include "quern/op_spec.h"

namespace quern {

/// A parsed pattern: ops over small local names. Throws a config error naming the fusion when the text is not one.
struct FusionPattern {
  struct Part {
    std::string kind;
    std::vector<int> inputs, outputs;  ///< indices into `names`; of an input that is not there kAbsent
  };
  static constexpr int kAbsent = -1;
  std::string kind;
  std::vector<std::string> names;
  std::vector<Part> parts;
  std::vector<int> inputs;   ///< free names, in order of first use
  std::vector<int> outputs;  ///< results, in order
};
FusionPattern parse_fusion(const Fusion& fusion, const OpSet& ops);

/// The fused kind as an op of the vocabulary: operands, aliasing and cost follow from its parts.
OpSpec fused_spec(const FusionPattern& pattern, const OpSet& ops);

/// `ops` must hold the fused kinds (see `add_fusions`). Patterns are tried in the order given, the earlier ones first;
/// of a pattern's matches at an op the first alone.
/// `accepts` is asked about every form in which the fused op would run (OpForms), and has to take them all: with the
/// outputs that are read, as they will be in the fused program, and both writing and adding where an output sums up,
/// since the micro-step decides that.
Program fuse(const Program& program, const OpSet& ops, std::span<const FusionPattern> patterns,
             const Geometry& geometry, const std::function<bool(const OpInstance&)>& accepts);

/// Parses a device's fusions and adds their kinds to `ops`.
std::vector<FusionPattern> add_fusions(OpSet& ops, std::span<const Fusion> fusions);

}  // namespace quern
