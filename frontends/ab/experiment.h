#pragma once
// Runs the arms of a comparison one after another, A B A B, each as a process with a directory of its own under the
// comparison's. Runs that are there already from an earlier, interrupted call on the same arms are kept.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ab/comparison.h"
#include "checkpoint/checkpoint_store.h"

namespace quern::ab {

struct Experiment {
  std::string program;                 ///< the quern to run
  std::string config;                  ///< file
  std::vector<std::string> overrides;  ///< of all arms; an arm's own come after
  std::vector<Arm> arms;
  std::vector<std::string> resolved;  ///< each arm's whole config, as text: what earlier runs are checked against
  std::vector<std::int64_t> seeds;    ///< train.seed of each arm's first repeat; the others count up
  int repeats = 1;
  std::string directory;
};

struct ExperimentResult {
  std::unique_ptr<RunLock> lock;  ///< on the experiment's directory, until its report is written too
  std::vector<ArmRuns> arms;
  int kept = 0;         ///< runs of an earlier call
  int interrupted = 0;  ///< the signal that ended it early; 0: none
};

/// Called before (code -1) and after each run.
using Progress = std::function<void(const Arm& arm, const Run& run, int number, int count)>;

/// A config error when the directory holds something else, a resources error when another process compares there.
ExperimentResult run_experiment(const Experiment& experiment, const Progress& progress);

}  // namespace quern::ab
