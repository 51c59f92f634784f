#pragma once
// What a run does around its steps besides training: samples, logs, evaluation, checkpoints, the guard. Each is a hook;
// the trainer has the list of them, and calls each point of all hooks in that order.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "log/event_log.h"
#include "optimizer/averaged_steps.h"
#include "run/ranks/ranks.h"
#include "run/session.h"

namespace quern {

/// Where a run is. The trainer moves it; hooks read it.
struct RunState {
  const Session& session;
  Engine& engine;
  Ranks& ranks;
  EventLog& log;
  std::function<bool()> stopping;  ///< whether the run is to stop
  /// The same; saves first when that is asked for. For whatever takes long between two steps.
  std::function<bool()> interrupted;
  DataSource* data = nullptr;         ///< of training; there once the run has started
  std::int64_t step = 0;              ///< optimizer steps finished
  std::int64_t tokens = 0;            ///< that these steps trained on; their batches may have differed
  std::int64_t updates = 0;           ///< steps that moved the weights
  AveragedSteps averaged = {};        ///< of these
  std::string data_before_step = {};  ///< position in the data before the step under way; empty: none is
  bool is_whole = true;               ///< the engine has the weights of `step`, not an update under way

  /// No step is under way any more; the engine has the state of this one.
  void stand_at(std::int64_t finished, std::int64_t trained_on) {
    step = finished;
    tokens = trained_on;
    data_before_step.clear();
    is_whole = true;
  }
};

/// A step under way.
struct Step {
  std::int64_t number = 0;        ///< from 1
  Observe observe = Observe::no;  ///< set by a hook, before the step
  float learning_rate = 0;
  std::vector<std::string> names = {};  ///< of its data, some thousands at most
  double begin = 0, end = 0;            ///< by now(); `end` and `result`: once the update is done
  Engine::StepResult result = {};

  /// A step whose targets are all masked has no loss and changes nothing.
  bool counts() const { return result.loss.valid_tokens > 0; }
  bool finite() const { return result.update.apply != 0 || !counts(); }
  double loss() const { return result.loss.loss_sum / result.loss.valid_tokens; }
  /// "train.tok window 17, train.tok window 4"
  std::string data() const;
};

/// The guard's decision on a step. Others than go_on are for steps whose update the device has not applied.
enum class Verdict : std::uint8_t {
  go_on,
  skip,       ///< the run stands at this step, with the weights of the one before it
  roll_back,  ///< to a checkpoint
  stop,       ///< the run fails
};

class Hook {
 public:
  virtual ~Hook() = default;
  virtual void before_step(const RunState&, Step&) {}
  /// Gradients are final; the update is not yet enqueued.
  virtual void before_update(const RunState&, const Step&) {}
  /// The update is enqueued, and the host would only wait.
  virtual void while_updating(const RunState&, const Step&) {}
  /// The result is there. After another answer than go_on, later hooks do not hear of this step.
  virtual Verdict after_step(const RunState&, const Step&) { return Verdict::go_on; }
  /// The run stands at a step that went well or was skipped.
  virtual void between_steps(const RunState&) {}
  /// The run went back to `state.step`, which is logged and saved already.
  virtual void rolled_back(const RunState&) {}
};

}  // namespace quern
