#pragma once
// One JSON object a line, for programs: {"event":"step","step":120,"loss":4.81}. A number that is not finite is null,
// with its name beside it: "loss":null,"loss_text":"nan". Each line is flushed, so a log can be followed.

#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>

#include "quern/log_sink.h"

namespace quern {

/// What becomes of a log that is there: a resumed run goes on with it.
enum class LogStart { replace, append };

/// The event as one line, without its end. Text that is not UTF-8 is made so.
std::string to_json_line(const LogEvent& event);

class JsonlSink final : public LogSink {
 public:
  /// Opens the file. Appending first removes an unfinished last line, left by a run that was killed. A resources error
  /// says why a file cannot be written, here and in `write`.
  JsonlSink(const std::filesystem::path& path, LogStart start);
  void write(const LogEvent& event) override;

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  std::string path_;
  std::unique_ptr<std::FILE, Close> file_;
};

}  // namespace quern
