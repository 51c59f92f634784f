#pragma once
// Pass 5, fuse: replaces groups of ops by fused forms that the device has a kernel for (see Fusion in device.h). A
// fused form keeps all results of its parts and rounds each at its dtype, so it changes no bit; results that nobody
// reads are never written.

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
    std::vector<int> inputs, outputs;  ///< indices into `names`
  };
  std::string kind;
  std::vector<std::string> names;
  std::vector<Part> parts;
  std::vector<int> inputs;   ///< free names, in order of first use
  std::vector<int> outputs;  ///< results, in order
};
FusionPattern parse_fusion(const Fusion& fusion, const OpSet& ops);

/// The fused kind as an op of the vocabulary: operands, aliasing and cost follow from its parts.
OpSpec fused_spec(const FusionPattern& pattern, const OpSet& ops);

/// `ops` must hold the fused kinds (see `add_fusions`). Patterns are tried in the order given, the earlier ones first.
Program fuse(const Program& program, const OpSet& ops, std::span<const FusionPattern> patterns);

/// Parses a device's fusions and adds their kinds to `ops`.
std::vector<FusionPattern> add_fusions(OpSet& ops, std::span<const Fusion> fusions);

}  // namespace quern
