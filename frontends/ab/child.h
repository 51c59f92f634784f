#pragma once
// One run as a process of its own, in a process group of its own: Ctrl-C at the terminal reaches only this process,
// which ends the child's whole group before it leaves. A child does not outlive its parent either.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace quern::ab {

struct ChildResult {
  int code = 0;                      ///< exit code, or 128 + the signal that ended it
  std::optional<int> interrupted;    ///< the signal that came to this process meanwhile; the child was killed then
  std::int64_t peak_host_bytes = 0;  ///< largest resident memory
  double seconds = 0;
};

/// Runs `words[0]` with the others as arguments, to its end; standard output and error go to those files. A resources
/// error when no process can be made. Other threads of this process must take no signals, as BackgroundOutput's.
ChildResult run_child(const std::vector<std::string>& words, const std::string& out, const std::string& err);

/// What a program last said on standard error: from the last "quern: error: " on, else the last line; shortened.
std::string last_error(const std::string& err_file);

}  // namespace quern::ab
