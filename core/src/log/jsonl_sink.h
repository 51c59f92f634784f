#pragma once
// One JSON object a line, for programs: {"event":"step","step":120,"loss":4.81}. A number that is not finite is null,
// with its name beside it: "loss":null,"loss_text":"nan". Each line is flushed, so a log can be followed.

#include <filesystem>
#include <string>

#include "quern/log_sink.h"

namespace quern {

/// The event as one line, without its end. Text that is not UTF-8 is made so.
std::string to_json_line(const LogEvent& event);

class JsonlSink final : public LogSink {
 public:
  /// `path` empty: log.jsonl in the run's directory.
  explicit JsonlSink(const std::filesystem::path& path = {}) : path_(path.string()), chosen_(!path.empty()) {}
  ~JsonlSink() override;
  JsonlSink(const JsonlSink&) = delete;
  JsonlSink& operator=(const JsonlSink&) = delete;
  /// A new run replaces a log of quern, and nothing else; a resumed one appends, after removing an unfinished last line
  /// left by a run that was killed. A resources error says why the file cannot be written, here and in `write`.
  void open(const RunPlace& place) override;
  /// An event that fails leaves no part of its line. A log that was removed is begun anew.
  void write(const LogEvent& event) override;

 private:
  void open_file(bool goes_on);
  [[noreturn]] void fail(const std::string& what, int error_number) const;
  std::string next_step() const;

  std::string path_;
  bool chosen_;  // by log.jsonl.path
  int file_ = -1;
};

}  // namespace quern
