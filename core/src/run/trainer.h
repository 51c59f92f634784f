#pragma once
// The training loop of one run: micro-batches and optimizer steps, and the hooks around them.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "plugin/plugin_host.h"
#include "quern/run.h"
#include "run/export/model_export.h"
#include "run/hooks/checkpoints.h"
#include "run/hooks/evaluation.h"
#include "run/hooks/guard.h"
#include "run/hooks/same_weights.h"
#include "run/hooks/samples.h"
#include "run/hooks/scale_log.h"
#include "run/hooks/spikes.h"
#include "run/hooks/start_log.h"
#include "run/hooks/step_log.h"
#include "run/hooks/telemetry_log.h"
#include "run/ranks/ranks.h"
#include "run/starting_point.h"

namespace quern {

class Trainer {
 public:
  /// Meets the other ranks, and takes the run directory and the device. `requests` are looked at between micro-batches,
  /// where a stop gives up the step under way; with several ranks between steps. All arguments outlive the trainer.
  /// Throws before anything in the directory has changed, but for its unfinished files.
  Trainer(
      Session& session, PluginHost& host, RunRequests& requests, StartProgress progress = [](std::string_view) {});

  Engine& engine() { return engine_; }
  RunPosition position() const;
  double learning_rate() const;
  void set_learning_rate(std::optional<double> rate) { learning_rate_ = rate; }

  /// Opens data, weights and log. Until it returns nothing is trained, and a process that ends loses nothing.
  void start();
  /// Runs to the end or to a stop; starts, where that was not done. The update of a step whose loss or gradient is not
  /// finite is not applied; then the guard's policy holds, and where that is to stop, a numerics error is thrown and
  /// nothing is saved. Before any other error is thrown (data, log, memory, ...) the steps done are saved, unless
  /// saving is what failed.
  RunResult run();
  /// One step as `run` makes it, without what comes at the end. False: none is left, or a stop.
  bool step();
  /// Saves the newest finished step, and awaits that.
  void save();
  /// Ranks::lead of this run's ranks, with the weights that are evaluated.
  void lead(const std::string& what, const std::function<void()>& work) {
    engine_.with(Weights::evaluated, [&] { ranks_.lead(what, engine_, work); });
  }

 private:
  void prepare();
  void open_data();
  void load_weights();
  std::int64_t tokens_of(const CheckpointMeta& meta) const;
  void open_sinks();

  /// Runs `work`, which moves the run; what it throws is thrown when the steps done are saved.
  void guarded(const std::function<void()>& work);
  void begin();
  /// False: there is no step left, or a stop.
  bool advance();
  /// False when it rolled back, and when a stop cut the step short.
  bool train_step();
  /// False: a stop cut the step short.
  bool run_micro_steps(Step& step);
  void roll_back();
  bool finish();
  bool save_before_failing(bool communicating);
  bool stopping() const { return ranks_.size() > 1 ? agreed_to_stop_ : requests_.stop.load() != 0; }
  bool interrupted();

  Session& session_;
  PluginHost& host_;
  EventLog log_;
  RunRequests& requests_;
  StartProgress progress_;
  StartLog start_log_;
  std::optional<RunLock> lock_;  // of rank 0
  Ranks ranks_;
  std::vector<LibraryIdentity> libraries_;
  Samples samples_;
  Guard guard_;
  std::optional<ModelExport> export_;
  StartingPoint start_;  // before the engine: a checkpoint may hold the device's tuning choices
  std::unique_ptr<Engine> ready_engine_;
  Engine& engine_;
  RunState state_;
  ScaleLog scale_log_;
  StepLog step_log_;
  TelemetryLog telemetry_log_;
  Spikes spikes_;
  SameWeights same_weights_;
  Evaluation evaluation_;
  Checkpoints checkpoints_;
  std::vector<Hook*> hooks_;  // in the order in which they run
  std::unique_ptr<DataSource> data_;
  std::optional<double> learning_rate_;  // in place of the schedule's
  std::vector<std::string> notes_;       // on resuming: changes since the checkpoint
  bool agreed_to_stop_ = false;          // by several ranks
  bool ready_ = false;                   // data, weights and sinks are there
  bool begun_ = false;                   // the first step may run
};

}  // namespace quern
