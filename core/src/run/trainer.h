#pragma once
// The training loop: micro-batches, optimizer steps, evaluation, checkpoints, log and export of one run.

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/checkpoint_saver.h"
#include "checkpoint/checkpoint_store.h"
#include "engine/engine.h"
#include "log/event_log.h"
#include "plugin/plugin_host.h"
#include "quern/data_source.h"
#include "run/guard.h"
#include "run/ranks.h"
#include "run/samples.h"
#include "run/scale_log.h"
#include "run/session.h"

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
  /// Reads the state in; what there is to say of it comes back.
  std::vector<std::string> continue_from(const Checkpoint& checkpoint);
  void open_sinks();
  /// False when it rolled back, to a step that is logged and saved already, and when a stop cut the step short.
  bool train_step();
  void at_step(std::int64_t step);
  bool not_finite(const Engine::StepResult& result, const std::vector<std::string>& data);
  void roll_back();
  void evaluate();
  void save();
  void start_saving();
  bool save_before_failing(bool communicating);
  void log_saved();
  void run_steps();
  bool finish();
  void log(const LogEvent& event) { log_.write(event); }
  void log_telemetry(const Telemetry& telemetry);
  bool stopping() const { return requests_.stop.load() != 0; }
  /// Between two steps, or within what comes between them: saves when that is asked for, and says whether to stop.
  bool interrupted();
  bool shows_step(std::int64_t step) const;
  bool evaluates(std::int64_t step) const;
  bool logs_scales(std::int64_t step) const;
  std::int64_t tokens_per_step() const;

  Session& session_;
  PluginHost& host_;
  EventLog log_;
  RunRequests& requests_;
  StartProgress progress_;
  RunLock lock_;
  std::vector<LibraryIdentity> libraries_;
  Samples samples_;
  Guard guard_;
  std::string export_config_;         // text of the export's config.json
  std::vector<std::string> removed_;  // leftovers of a crash, to be told of
  NewestCheckpoint newest_;           // before the engine: a checkpoint may hold the device's tuning choices
  Engine engine_;
  CheckpointSaver saver_;
  Ranks ranks_;
  std::unique_ptr<DataSource> data_, validation_;
  std::vector<ObservedTensor> observed_;  // whose figures are logged
  std::vector<std::string> notes_;        // on resuming: what is not as it was
  bool ready_ = false;                    // data, weights and sinks are there
  bool resumed_ = false, told_unavailable_ = false;
  bool evaluation_cut_ = false;  // the evaluation at started_at_ is still to be made
  std::int64_t step_ = 0, started_at_ = 0;
  std::int64_t updates_ = 0;            ///< steps that moved the weights
  std::string data_before_step_;        ///< position in the data before the step under way; empty: none is
  bool state_is_whole_ = true;          ///< the engine has the weights of step_, not those of an update under way
  double started_ = 0;                  ///< clock at this session's first step; times that are logged count from it
  double in_steps_ = 0;                 ///< seconds of training steps since then, without evaluations and checkpoints
  double last_loss_, last_validation_;  ///< NaN: none
  std::int64_t last_saved_ = -1, last_evaluated_ = -1;
  std::int64_t rolled_back_to_ = -1;  // no step went well since, while step_ is this
};

}  // namespace quern
