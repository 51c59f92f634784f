#pragma once
// Starts the processes of a run on this machine and stays with them: signals go on to them over a link, the first that
// fails ends all, and one message says why.

#include <csignal>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace quern {

struct RankProcess {
  std::string name;                ///< for messages: "rank 2"
  std::vector<std::string> words;  ///< program, found as a shell does, and its arguments
  std::vector<std::pair<std::string, std::string>> environment = {};  ///< beside this process's own
  bool shows_output = false;  ///< its standard output is this process's; else it goes nowhere
};

/// INT, TERM, HUP, USR1 and XCPU: what stops or saves a run.
inline constexpr int kForwardedSignals[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGXCPU};

/// While this lives, the signals of them that are not ignored (nohup) wait: for supervise(), which takes them, or for
/// their handlers when this goes.
class WaitingSignals {
 public:
  WaitingSignals();
  ~WaitingSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  WaitingSignals(const WaitingSignals&) = delete;
  WaitingSignals& operator=(const WaitingSignals&) = delete;

 private:
  sigset_t before_{};
};
/// One that stops a run and waits; 0: none.
int waiting_stop();
/// In a process that does not forward them: they reach it.
void take_waiting_signals();

/// How long processes may take to end, in seconds.
struct Patience {
  double by_itself = 2;   ///< after another failed, before they are sent SIGTERM
  double on_request = 3;  ///< after that, or a second Ctrl-C, before SIGKILL
  double insists = 1;     ///< a second one that comes earlier is the first again: `timeout` sends two
  double stopped = 10;    ///< by SIGSTOP, while it was given time to finish, before SIGKILL
};

struct RunEnd {
  int code = 0;              ///< of the process that failed first; 6 when a signal or a library ended it
  bool stopped = false;      ///< by a signal to this process: code is the shell's for it
  std::string cause = {};    ///< why, for people: "rank 2: out of device memory"; empty: nothing failed
  std::string output = {};   ///< what else that process wrote last to standard error
  bool unexplained = false;  ///< it did not say why: a library ended it
  bool trained = false;      ///< some process had begun to train
};

/// Runs them until all have ended, on the main thread; none outlives this process. `warn` gets lines that the first
/// process writes to standard error while it runs. Forwarded signals go on to all, over their links; SIGCHLD is taken.
/// After a failure a process that asks for time (time_from_starter) is given it, unless a signal insists or it is
/// stopped.
/// A communication error counts as the cause only when nothing else failed: it follows from what happens to another.
/// Throws a resources error when a process cannot be started; those that were are ended then.
RunEnd supervise(const std::vector<RankProcess>& processes, const std::function<void(const std::string&)>& warn,
                 const Patience& patience = {});

}  // namespace quern
