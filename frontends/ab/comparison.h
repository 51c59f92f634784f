#pragma once
// Figures of a comparison, from the runs of its arms. Each repeat has its own seed, shared by all arms, so differences
// are taken run against run with the same seed; the spread over seeds says what size of difference means something.

#include <optional>
#include <string>
#include <vector>

#include "ab/arms.h"
#include "ab/run_log.h"
#include "ab/statistics.h"

namespace quern::ab {

struct Run {
  std::int64_t seed = 0;
  std::string directory;
  int code = 0;         ///< exit code, or 128 + the signal that ended it
  std::string message;  ///< its last error, when the code is not 0
  double seconds = 0;   ///< of the whole process
  std::int64_t peak_host_bytes = 0;
  RunLog log;
  bool good() const { return code == 0; }
};

struct ArmRuns {
  Arm arm;
  std::vector<Run> runs;  ///< one a repeat
};

/// One figure of an arm, over its good runs; NaN where there is none. Deviations are over seeds.
struct Figure {
  double mean, deviation;
  double difference, difference_deviation;  ///< from the first arm's run with the same seed
};

struct ArmFigures {
  std::string name;
  int good_runs = 0;
  double tokens_per_second;  ///< median of all timed steps; a run's first step is not timed when it has others
  Interval speed_interval;   ///< median_interval over runs and steps
  double speed_ratio;        ///< median over repeats of this arm's median speed by the first arm's
  Interval speed_ratio_range;
  double waiting;  ///< share of a step that the rank which waits least waits for collectives: median; NaN: one rank
  std::int64_t device_bytes = 0, host_bytes = 0;  ///< largest of the runs; device: planned, all allocated at start
  Figure loss;                                    ///< mean over the last tenth of a run's steps
  Figure validation_loss;                         ///< last evaluation
  Figure gradient_norm;                           ///< mean over a run's steps
  /// A repeat each: first step whose loss differs from the first arm's in any bit; 0: none. Empty optional: no pair.
  std::vector<std::optional<std::int64_t>> first_differences;
};

/// Tokens/s: median over the run's steps without the first, if it has others; NaN without steps.
double median_speed(const Run& run);

/// Figures of each arm; the first is compared with itself.
std::vector<ArmFigures> compare(const std::vector<ArmRuns>& arms);

struct ComparisonHead {
  std::string config;  ///< file
  std::string quern;   ///< version
  int repeats = 0;
};

/// Tables and notes on them, padded so that they also read well in a terminal.
std::string comparison_markdown(const ComparisonHead& head, const std::vector<ArmRuns>& arms);
/// The same with every run, for programs.
std::string comparison_json(const ComparisonHead& head, const std::vector<ArmRuns>& arms);

}  // namespace quern::ab
