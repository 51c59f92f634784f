#pragma once
// The training loop: micro-batches, optimizer steps, evaluation, checkpoints, log and export of one run.

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_store.h"
#include "quern/data_source.h"
#include "quern/log_sink.h"
#include "train/engine.h"
#include "train/session.h"

namespace quern {

struct RunResult {
  std::int64_t step = 0;      ///< optimizer steps finished
  bool finished = false;      ///< false: stopped by request; a checkpoint was written
};

class Trainer {
 public:
  /// `stop` is looked at between steps; set, the run saves and returns. All arguments outlive the trainer.
  Trainer(Session& session, PluginHost& host, const std::atomic<int>& stop);

  const Plan& plan() const { return engine_.plan(); }

  /// Runs to the end or to a stop. Throws a numerics error when a loss or gradient is not finite.
  RunResult run();

 private:
  void start();
  void train_step();
  double evaluate();
  void save();
  void finish();
  void log(LogEvent event);

  Session& session_;
  std::vector<std::unique_ptr<LogSink>> sinks_;
  const std::atomic<int>& stop_;
  RunLock lock_;
  NewestCheckpoint newest_;  // before the engine: a checkpoint may hold the device's tuning choices
  Engine engine_;
  std::unique_ptr<DataSource> data_, validation_;
  std::int64_t step_ = 0, started_at_ = 0;
  double seconds_before_ = 0;  ///< of earlier sessions of this run
  double started_ = 0;         ///< clock at the first step
  double last_loss_ = 0, last_validation_ = 0;
  std::int64_t last_saved_ = -1, last_evaluated_ = -1;
};

}  // namespace quern
