#pragma once
// What a run left in its log.jsonl, as far as comparing runs needs it.

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace quern::ab {

struct StepRecord {
  std::int64_t step = 0;
  double loss = 0, gradient_norm = 0;  ///< exactly as the trainer had them; NaN: not finite, or not logged
  double tokens_per_second = 0;
  double waited = std::numeric_limits<double>::quiet_NaN();  ///< seconds, by the rank that waited least; NaN: one rank
};

struct RunLog {
  std::int64_t tokens_per_step = 0, device_bytes = 0;  ///< 0: not logged
  std::vector<StepRecord> steps;                       ///< by step, each once
  std::optional<double> validation_loss;               ///< of the last evaluation
  bool ended = false;
};

/// Reads a log; a last line that was never finished is left out. An input error says what cannot be read.
RunLog read_run_log(const std::string& path);

/// First step whose loss has other bits, or which only one of them has; none when there is no such step.
std::optional<std::int64_t> first_difference(const RunLog& a, const RunLog& b);

}  // namespace quern::ab
