#pragma once
// The training loop of one run: micro-batches and optimizer steps, and the hooks around them.

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "plugin/plugin_host.h"
#include "run/checkpoints.h"
#include "run/evaluation.h"
#include "run/guard.h"
#include "run/model_export.h"
#include "run/ranks.h"
#include "run/samples.h"
#include "run/scale_log.h"
#include "run/spikes.h"
#include "run/starting_point.h"
#include "run/step_log.h"
#include "run/telemetry_log.h"

namespace quern {

/// What a signal handler asks of a run.
struct RunRequests {
  std::atomic<int> stop{0};       ///< not 0: save and return, at the next micro-batch
  std::atomic<bool> save{false};  ///< save the newest finished step, and go on
};

struct RunResult {
  std::int64_t step = 0;            ///< optimizer steps finished
  bool finished = false;            ///< false: stopped by request; every finished step is in a checkpoint
  std::vector<std::string> untold;  ///< warnings about log sinks that no sink took
};

/// Told what a start is at: "planning", "loading weights"; empty: nothing that takes long, and others may print.
using StartProgress = std::function<void(std::string_view)>;

class Trainer {
 public:
  /// Takes the run directory and the device. `requests` are looked at between micro-batches; a stop gives up the step
  /// under way. All arguments outlive the trainer. Throws before anything in the directory has changed, but for its
  /// unfinished files.
  Trainer(
      Session& session, PluginHost& host, RunRequests& requests, StartProgress progress = [](std::string_view) {});

  const Plan& plan() const { return engine_.plan(); }

  /// Opens data, weights and log. Until it returns nothing is trained, and a process that ends loses nothing.
  void start();
  /// Runs to the end or to a stop; starts, where that was not done. The update of a step whose loss or gradient is not
  /// finite is not applied; then the guard's policy holds, and where that is to stop, a numerics error is thrown and
  /// nothing is saved. Before any other error is thrown (data, log, memory, ...) the steps done are saved, unless
  /// saving is what failed.
  RunResult run();

 private:
  void open_data();
  void load_weights();
  void open_sinks();

  void run_steps();
  /// False when it rolled back, and when a stop cut the step short.
  bool train_step();
  /// False: a stop cut the step short.
  bool run_micro_steps(Step& step);
  void roll_back();
  bool finish();
  bool save_before_failing(bool communicating);
  bool stopping() const { return requests_.stop.load() != 0; }
  bool interrupted();

  Session& session_;
  PluginHost& host_;
  EventLog log_;
  RunRequests& requests_;
  StartProgress progress_;
  RunLock lock_;
  std::vector<LibraryIdentity> libraries_;
  Samples samples_;
  Guard guard_;
  ModelExport export_;
  StartingPoint start_;  // before the engine: a checkpoint may hold the device's tuning choices
  Engine engine_;
  RunState state_;
  ScaleLog scale_log_;
  StepLog step_log_;
  TelemetryLog telemetry_log_;
  Spikes spikes_;
  Evaluation evaluation_;
  Checkpoints checkpoints_;
  Ranks ranks_;
  std::vector<Hook*> hooks_;  // in the order in which they run
  std::unique_ptr<DataSource> data_;
  std::vector<std::string> notes_;  // on resuming: what is not as it was
  bool ready_ = false;              // data, weights and sinks are there
};

}  // namespace quern
