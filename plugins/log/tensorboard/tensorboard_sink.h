#pragma once
// A run's numbers as TensorBoard shows them: an event file in the run's directory, so that `tensorboard --logdir runs`
// names runs as quern does. Tags are "train/loss", "eval/loss" and so on; an event of another kind that has a step goes
// in under its own name, and one about a tensor under the tensor's too. Each event is flushed.

#include <string>

#include "quern/log_sink.h"

namespace quern::tensorboard {

class TensorboardSink final : public LogSink {
 public:
  TensorboardSink() = default;
  ~TensorboardSink() override;
  TensorboardSink(const TensorboardSink&) = delete;
  TensorboardSink& operator=(const TensorboardSink&) = delete;
  /// A file of its own for every start; a resources error when it cannot be written, here and in `write`.
  void open(const RunPlace& place) override;
  /// An event that fails leaves no part of its record, for the file could not be read past that.
  void write(const LogEvent& event) override;

 private:
  void append(const std::string& message);

  std::string path_;
  int file_ = -1;
};

}  // namespace quern::tensorboard
