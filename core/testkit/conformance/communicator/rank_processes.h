#pragma once
// Ranks for the contracts of communicators: each a process of this machine, forked from the one that checks, which has
// no device open. A rank that crashes, hangs or is stopped leaves a verdict and nothing else.

#include <functional>
#include <string>
#include <vector>

#include "quern/error.h"

namespace quern::conformance {

struct RankOutcome {
  enum class Kind { returned, threw, died } kind = Kind::died;
  std::string text = {};                 ///< that the body returned, of the Error, or what became of the process
  ErrorCode code = ErrorCode::internal;  ///< of the Error
};

/// Runs `body(rank)` in `size` processes and returns what became of each. Who is not done after `limit` seconds, or is
/// stopped when the others are done, is killed. A Broken or Skipped that a body throws is thrown here, with the rank's
/// number.
std::vector<RankOutcome> run_ranks(int size, double limit, const std::function<std::string(int rank)>& body);
/// As run_ranks; broken unless every rank's body returns.
std::vector<RankOutcome> run_all_ranks(int size, double limit, const std::function<std::string(int rank)>& body);

}  // namespace quern::conformance
