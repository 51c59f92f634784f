#pragma once
// Measures what transfers between ranks add to a training step: what `quern bench transfers` prints.

#include <cstdint>
#include <string>

#include "base/files/descriptor.h"
#include "run/ranks/ranks.h"
#include "run/session.h"

namespace quern::bench {

/// Seconds of the slowest rank, medians over steps.
struct TransfersResult {
  std::string communicator;
  int ranks = 1;
  double tokens_per_step = 0;
  double step = 0;     ///< of a training step
  double without = 0;  ///< of the same with no-op collectives, so that ranks synchronize between steps alone
  double added() const { return step - without; }
};

/// Collective: every rank calls it. Trains `steps` steps on random tokens, after one to warm up, and then as many whose
/// collectives do nothing. Refuses reproducible sums, whose steps would do other work.
TransfersResult run_transfers_bench(Session& session, Ranks& ranks, std::int64_t steps);

std::string transfers_table(const TransfersResult& result, const DeviceTraits& device);
std::string transfers_json(const TransfersResult& result, const DeviceTraits& device, const std::string& commit);
/// How the text of transfers_json begins.
inline constexpr FileKind kTransfersFile{"a file of quern bench transfers", "{\n \"transfers_of\": \""};

}  // namespace quern::bench
