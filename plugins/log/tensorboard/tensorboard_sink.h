#pragma once
// A run's numbers as TensorBoard shows them: an event file in the run's directory, so that `tensorboard --logdir runs`
// names runs as quern does. Tags are "train/loss", "eval/loss" and so on; an event of another kind that has a step goes
// in under its own name, and one about a tensor under the tensor's too. Each event is flushed.

#include <cstdio>
#include <memory>
#include <string>

#include "quern/log_sink.h"

namespace quern::tensorboard {

class TensorboardSink final : public LogSink {
 public:
  /// A file of its own for every start; a resources error when it cannot be written, here and in `write`.
  void open(const RunPlace& place) override;
  void write(const LogEvent& event) override;

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  void append(const std::string& message);

  std::string path_;
  std::unique_ptr<std::FILE, Close> file_;
};

}  // namespace quern::tensorboard
