#include "ab/child.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <fstream>
#include <iterator>

#include "base/clock.h"
#include "base/files/durable_file.h"
#include "quern/error.h"

namespace quern::ab {

namespace {

bool is_ignored(int signal) {
  struct sigaction action {};
  return ::sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

/// Holds back the signals that `wait` takes, so that none is lost between two waits. One that is ignored and blocked
/// would be taken all the same: under nohup a dropped terminal ends nothing.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigemptyset(&blocked_);
    for (int signal : {SIGCHLD, SIGINT, SIGTERM, SIGXCPU}) sigaddset(&blocked_, signal);
    if (!is_ignored(SIGHUP)) sigaddset(&blocked_, SIGHUP);
    ::pthread_sigmask(SIG_BLOCK, &blocked_, &before_);
  }
  ~BlockedSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

  const sigset_t& before() const { return before_; }
  int wait() const {
    int signal;
    while ((signal = sigwaitinfo(&blocked_, nullptr)) < 0) {
    }
    return signal;
  }

 private:
  sigset_t blocked_, before_;
};

// Between fork and exec: only calls that are safe there.
[[noreturn]] void become(char* const* words, const char* out, const char* err, pid_t parent, const sigset_t& signals) {
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(127);  // it died before the line above
  int streams[] = {::open("/dev/null", O_RDONLY), ::open(out, O_WRONLY | O_CREAT | O_TRUNC, 0644),
                   ::open(err, O_WRONLY | O_CREAT | O_TRUNC, 0644)};
  for (int stream = 0; stream < 3; ++stream)
    if (streams[stream] < 0 || ::dup2(streams[stream], stream) < 0) ::_exit(126);
  ::sigprocmask(SIG_SETMASK, &signals, nullptr);
  ::execv(words[0], words);
  ::_exit(127);
}

// The child as it ended; `usage` is filled.
int reap(pid_t child, rusage& usage) {
  int status = 0;
  while (::wait4(child, &status, 0, &usage) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace

ChildResult run_child(const std::vector<std::string>& words, const std::string& out, const std::string& err) {
  std::vector<char*> pointers;
  for (const std::string& word : words) pointers.push_back(const_cast<char*>(word.c_str()));
  pointers.push_back(nullptr);
  BlockedSignals signals;
  double begin = now();
  pid_t parent = ::getpid(), child = ::fork();
  if (child < 0) fail_resources(words[0], "no process can be started", errno);
  if (child == 0) become(pointers.data(), out.c_str(), err.c_str(), parent, signals.before());
  ::setpgid(child, child);  // here too: whichever process is first

  ChildResult result;
  rusage usage{};
  for (siginfo_t state{};; state = {}) {
    int signal = signals.wait();
    if (signal != SIGCHLD) {
      result.interrupted = signal;
      break;
    }
    if (::waitid(P_PID, static_cast<id_t>(child), &state, WEXITED | WNOHANG | WNOWAIT) == 0 && state.si_pid == child)
      break;
  }
  ::kill(-child, SIGKILL);  // what it left behind, or all of it; the group's id is held until the child is reaped
  result.code = reap(child, usage);
  result.peak_host_bytes = static_cast<std::int64_t>(usage.ru_maxrss) * 1024;
  result.seconds = now() - begin;
  return result;
}

std::string last_error(const std::string& err_file) {
  constexpr std::size_t kLongest = 2000;
  std::ifstream file(err_file, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  text.erase(text.find_last_not_of(" \n\r\t") + 1);
  const std::string mark = "quern: error: ";
  std::size_t begin = text.rfind(mark);
  if (begin != std::string::npos) {
    begin += mark.size();
  } else {
    begin = text.rfind('\n');
    begin = begin == std::string::npos ? 0 : begin + 1;
  }
  text = text.substr(begin);
  return text.size() <= kLongest ? text : text.substr(0, kLongest) + "...";
}

}  // namespace quern::ab
