#pragma once
// What end-to-end tests share: a tiny run in a directory of its own, trained in this process or by the program as a
// child, and the tensors and losses that it leaves.

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/test_directory.h"
#include "run/trainer.h"

namespace quern::testing {

using Overrides = std::vector<std::string>;  // "a.b=value"

/// Token files, a config, and a run directory. The data are 13 windows of 16 tokens: a pass ends within a micro-batch
/// of 2. The config trains a 2-layer llama of width 32 and vocabulary 64.
class TinyFiles {
 public:
  TinyFiles();
  std::string config() const { return directory_ / "run.toml"; }
  std::string at(const std::string& name) const { return directory_ / name; }
  /// "log.directory=<at(name)>"
  std::string run(const std::string& name) const { return "log.directory=" + at(name); }

 private:
  TestDirectory directory_;
};

/// A step's loss, exactly as the trainer gave it.
using Losses = std::map<std::int64_t, double>;

struct SessionResult {
  RunResult result;
  Losses losses;
};

/// Trains in this process, and stops as a signal would after step `stop_after` (0: not). `change` may exchange the
/// session's components.
SessionResult train_here(const TinyFiles& files, const Overrides& overrides, std::int64_t stop_after = 0,
                         const std::function<void(Session&)>& change = {});

/// Device memory that the plan takes, in bytes.
std::int64_t planned_bytes(const TinyFiles& files, const Overrides& overrides);

/// tensors.safetensors of a run's newest checkpoint, byte for byte: masters and optimizer state.
std::string newest_tensors(const std::string& run_directory);
/// Step of that checkpoint; -1: none.
std::int64_t newest_step(const std::string& run_directory);

/// log.jsonl, each line parsed; a last line that is not finished is left out.
std::vector<nlohmann::json> log_of(const std::string& run_directory);
std::vector<nlohmann::json> events(const std::string& run_directory, const std::string& kind);
/// Losses of the step events; REQUIREs that a step logged twice, after a kill, has one loss.
Losses logged_losses(const std::string& run_directory);

std::string read_text(const std::string& path);
void write_text(const std::string& path, const std::string& text);
bool has(const std::string& text, const std::string& part);
std::size_t occurrences(const std::string& text, const std::string& part);

/// The program as a child process, its streams in files. `prepare` runs in the child before the program: limits,
/// signals, other streams.
class Child {
 public:
  explicit Child(std::vector<std::string> arguments, const std::function<void()>& prepare = {});
  ~Child();
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  pid_t process() const { return pid_; }
  void signal(int number) const;
  bool running();
  /// Exit code, or minus the signal that ended it.
  int wait();
  std::string out() const { return read_text(directory_ / "out"); }
  std::string err() const { return read_text(directory_ / "err"); }

 private:
  TestDirectory directory_;
  pid_t pid_ = -1;
  int status_ = 0;
};

struct Outcome {
  int code = 0;
  std::string out, err;
};
/// CHECKs the code, and one message that has all of `parts`.
void check_fails(const Outcome& outcome, int code, const std::vector<std::string>& parts);
/// `quern` with those words, to its end.
Outcome quern_run(std::vector<std::string> arguments, const std::function<void()>& prepare = {});
/// `quern train` on the files' config.
Outcome quern_train(const TinyFiles& files, const Overrides& overrides);
std::vector<std::string> train_arguments(const TinyFiles& files, const Overrides& overrides);

}  // namespace quern::testing
