#pragma once
// One JSON object a line, for programs: {"event":"step","step":120,"loss":4.81}. A number that is not finite is null,
// with its name beside it: "loss":null,"loss_text":"nan". Each line is flushed, so a log can be followed.

#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>

#include "quern/log_sink.h"

namespace quern {

/// The event as one line, without its end. Text that is not UTF-8 is made so.
std::string to_json_line(const LogEvent& event);

class JsonlSink final : public LogSink {
 public:
  /// `path` empty: log.jsonl in the run's directory.
  explicit JsonlSink(const std::filesystem::path& path = {}) : path_(path.string()) {}
  /// A resumed run appends, after removing an unfinished last line left by a run that was killed. A resources error
  /// says why the file cannot be written, here and in `write`.
  void open(const RunPlace& place) override;
  void write(const LogEvent& event) override;

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  std::string path_;
  std::unique_ptr<std::FILE, Close> file_;
};

}  // namespace quern
