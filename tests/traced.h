#pragma once
// A child process that is stopped before every operation it does on files below a directory, so that a test can kill or
// interrupt it at each. ptrace: the program needs no hooks and runs as it is.

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

namespace quern::testing {

/// An operation about to be done.
struct FileOperation {
  pid_t process = 0;
  std::string call;  ///< "open" (for writing), "write", "truncate", "fsync", "rename", "mkdir" or "remove"
  std::string path;  ///< of a rename: from
  std::string to;    ///< of a rename
};

/// Called with each; returns a signal to send before the operation (SIGKILL: it is not done), 0 for none.
using Visit = std::function<int(const FileOperation&)>;

/// Whether processes may be traced here.
bool can_trace();

/// Forks, runs `body` in the child and ends it; visits its operations on paths below `directory`. Returns the exit
/// code, or minus the signal that ended it. `body` may exec.
int run_traced(const std::string& directory, const std::function<void()>& body, const Visit& visit);

/// `quern` with those words; its output is discarded.
int run_traced(const std::string& directory, std::vector<std::string> words, const Visit& visit);

}  // namespace quern::testing
