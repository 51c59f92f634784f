#pragma once
// Measures a communicator between the ranks of a config, each with its device: what `quern bench comm` prints.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/files/descriptor.h"
#include "run/ranks/ranks.h"
#include "run/session.h"

namespace quern::bench {

/// One collective at one size. Seconds are the slowest rank's, the median of several.
struct CollectiveTime {
  std::string collective;
  std::int64_t bytes = 0;  ///< of the whole, over all ranks; of the message for send_receive
  double seconds = 0;
  double bus_rate = 0;  ///< bytes/s: those that have to cross a rank's link one way, by the time
};

/// A large matmul, alone and while all_gathers run on another stream.
struct ProductBeside {
  double alone = 0, beside = 0;              ///< seconds
  bool covered = false;                      ///< the gathers outlasted the matmuls
  double clock_alone = 0, clock_beside = 0;  ///< MHz while they ran, the lowest of all ranks; 0: not known
  double at_equal_clocks = 0;  ///< how many times as many clock cycles they took beside gathers, of the slowest rank
};

struct CommBenchResult {
  std::string communicator;
  int ranks = 1;
  double link_rate = 0;  ///< bytes/s one way, rated; 0: not known
  std::vector<CollectiveTime> times;
  std::optional<ProductBeside> product;
};

struct CommBenchOptions {
  std::vector<std::int64_t> sizes;  ///< bytes a rank has of the whole
  double throttle = 0;              ///< bytes/s, of each stream's copies; 0: as the device copies
  /// Gets the table, a piece as soon as it is known; only on rank 0.
  std::function<void(const std::string& text)> print;
};

/// Collective: every rank calls it. Rank 0's result covers all.
CommBenchResult run_comm_bench(Session& session, Ranks& ranks, const CommBenchOptions& options);

/// The table's head, a line of it, and its end.
std::string comm_table_head(const CommBenchResult& result, const DeviceTraits& device);
std::string comm_table_line(const CommBenchResult& result, const CollectiveTime& time);
std::string comm_table_end(const ProductBeside& product);
std::string comm_bench_json(const CommBenchResult& result, const DeviceTraits& device, const std::string& commit);
/// How the text of comm_bench_json begins.
inline constexpr FileKind kCommBenchFile{"a file of quern bench comm", "{\n \"communicator\": \""};

}  // namespace quern::bench
