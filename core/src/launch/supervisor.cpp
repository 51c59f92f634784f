#include "launch/supervisor.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <fstream>
#include <optional>

#include "base/files/descriptor.h"
#include "base/files/durable_file.h"
#include "launch/local_ranks.h"
#include "launch/starter_link.h"
#include "quern/error.h"

namespace quern {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::string_view kError = "quern: error: ";
constexpr std::size_t kMostKept = 8192;  // bytes of a process's standard error
constexpr double kAgain = 0.1;           // seconds until those that were given time are looked at again

Clock::duration seconds_of(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}
bool is_stop(int signal) {
  return signal != SIGUSR1 &&
         std::find(std::begin(kForwardedSignals), std::end(kForwardedSignals), signal) != std::end(kForwardedSignals);
}

constexpr int kCommunication = static_cast<int>(ErrorCode::communication);
constexpr int kExitOfLibraries = 1;  // without a word: quern says why it leaves with it

/// Of them, those that are not ignored.
sigset_t forwarded_signals() {
  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal : kForwardedSignals) {
    struct sigaction action {};
    if (::sigaction(signal, nullptr, &action) == 0 && action.sa_handler != SIG_IGN) sigaddset(&signals, signal);
  }
  return signals;
}

/// The signals that are forwarded, and SIGCHLD, as a descriptor while this lives.
class SignalQueue {
 public:
  SignalQueue() {
    sigset_t taken = forwarded_signals();
    sigaddset(&taken, SIGCHLD);
    ::signal(SIGCHLD, SIG_DFL);  // where it is ignored, nobody learns how a process ended
    ::pthread_sigmask(SIG_BLOCK, &taken, &before_);
    queue_ = OwnedDescriptor(::signalfd(-1, &taken, SFD_CLOEXEC | SFD_NONBLOCK));
    if (!queue_) fail_resources("signals", "no descriptor is free", errno);
  }
  ~SignalQueue() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalQueue(const SignalQueue&) = delete;
  SignalQueue& operator=(const SignalQueue&) = delete;

  int descriptor() const { return queue_.get(); }
  /// 0: none.
  int next() {
    signalfd_siginfo info{};
    return ::read(queue_.get(), &info, sizeof info) == sizeof info ? static_cast<int>(info.ssi_signo) : 0;
  }

 private:
  sigset_t before_{};
  OwnedDescriptor queue_;
};

/// Arguments of exec, made before the fork: after it nothing may be allocated.
struct Prepared {
  explicit Prepared(const RankProcess& process) {
    for (const std::string& word : process.words) words.push_back(const_cast<char*>(word.c_str()));
    for (char** variable = ::environ; *variable; ++variable) {
      const std::string_view text = *variable;
      const std::string_view name = text.substr(0, text.find('='));
      if (std::none_of(process.environment.begin(), process.environment.end(),
                       [&](const auto& own) { return own.first == name; }))
        variables.push_back(*variable);
    }
    for (const auto& [name, value] : process.environment) texts.push_back(name + "=" + value);
    for (std::string& text : texts) variables.push_back(text.data());
    words.push_back(nullptr);
    variables.push_back(nullptr);
  }
  std::vector<std::string> texts;
  std::vector<char*> words, variables;
};

[[noreturn]] void become(const RankProcess& process, const Prepared& prepared, int err, int link, pid_t parent) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(1);  // it died before that
  const int nothing = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  ::dup2(nothing, STDIN_FILENO);
  if (!process.shows_output) ::dup2(nothing, STDOUT_FILENO);
  ::dup2(err, STDERR_FILENO);
  ::dup2(link, kLinkOfRank);
  ::fcntl(kLinkOfRank, F_SETFD, 0);                                      // where it was that already
  for (const int signal : kForwardedSignals) ::signal(signal, SIG_IGN);  // they come over the link
  take_waiting_signals();
  ::execvpe(prepared.words[0], prepared.words.data(), prepared.variables.data());
  const char* const text = std::strerror(errno);
  for (const char* part : {"quern: error: the program cannot be started: ", text, "\n"})
    write_if_taken(STDERR_FILENO, part, std::chrono::milliseconds(0));
  ::_exit(static_cast<int>(ErrorCode::resources));
}

struct Running {
  const RankProcess* process;
  pid_t id = -1;
  OwnedDescriptor err = {};
  std::optional<RankLink> link = {};
  std::string line = {};                               // of standard error, not ended yet
  std::string error = {};                              // what it says is its error
  std::string said = {};                               // its last other lines
  std::optional<int> status = {};                      // as waitpid() has it
  bool told = false;                                   // to end, by us
  bool given_time = false;                             // to finish, and it was said
  std::optional<Clock::time_point> stands_since = {};  // of a process with such time: stopped, as by SIGSTOP
};

/// Whether a signal has stopped a process, which then finishes nothing.
bool stands_still(pid_t process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  std::string line;
  std::getline(file, line);
  const std::size_t name_end = line.rfind(')');  // the name may have anything in it
  return name_end + 2 < line.size() && (line[name_end + 2] == 'T' || line[name_end + 2] == 't');
}

class Supervisor {
 public:
  Supervisor(const std::vector<RankProcess>& processes, const std::function<void(const std::string&)>& warn,
             const Patience& patience)
      : warn_(warn), patience_(patience) {
    for (const RankProcess& process : processes) running_.push_back({.process = &process});
  }
  ~Supervisor() {  // after an exception
    for (Running& one : running_)
      if (one.id > 0 && !one.status) ::kill(one.id, SIGKILL), ::waitpid(one.id, nullptr, 0);
  }

  RunEnd run() {
    for (Running& one : running_) start(one);
    while (std::any_of(running_.begin(), running_.end(), [](const Running& one) { return !one.status; })) {
      wait();
      while (const int signal = signals_.next())
        if (signal != SIGCHLD) forward(signal);
      for (Running& one : running_) {
        read(one);
        reap(one);
      }
      end_late();
    }
    return verdict();
  }

 private:
  void start(Running& one) {
    int ends[2] = {-1, -1};
    if (::pipe2(ends, O_CLOEXEC) != 0) fail_resources(one.process->name, "no pipe", errno);
    OwnedDescriptor write_end(ends[1]);
    one.err = OwnedDescriptor(ends[0]);
    ::fcntl(one.err.get(), F_SETFL, O_NONBLOCK);
    const Prepared prepared(*one.process);
    const pid_t parent = ::getpid();
    one.link.emplace();
    one.id = ::fork();
    if (one.id == 0) become(*one.process, prepared, write_end.get(), one.link->other_end(), parent);
    if (one.id < 0) fail_resources(one.process->name, "no process can be started", errno);
    one.link->started();
  }

  void wait() {
    std::vector<pollfd> polls = {{.fd = signals_.descriptor(), .events = POLLIN, .revents = 0}};
    for (const Running& one : running_) {
      if (one.err) polls.push_back({.fd = one.err.get(), .events = POLLIN, .revents = 0});
      if (one.link) polls.push_back({.fd = one.link->descriptor(), .events = POLLIN, .revents = 0});
    }
    constexpr int kLook = 50;  // ms, while there is a deadline
    ::poll(polls.data(), polls.size(), deadline_ ? kLook : -1);
  }

  void forward(int signal) {
    if (signal == SIGINT || signal == SIGTERM) {
      if (!asked_) asked_ = Clock::now();
      if (!insisted_ && Clock::now() - *asked_ > seconds_of(patience_.insists)) {
        insisted_ = true;
        kill_at(patience_.on_request);
      }
    }
    if (is_stop(signal) && !stop_signal_) stop_signal_ = signal;
    send(signal);
  }

  void send(int signal) {
    for (const Running& one : running_)
      if (!one.status && one.link) one.link->send_signal(signal);
  }

  void read(Running& one) {
    if (one.link) {
      const bool open = one.link->read();
      trained_ = trained_ || one.link->trains();
      if (!open) one.link.reset();
    }
    char bytes[4096];
    // One that writes without end must not keep the others waiting.
    for (int times = 0; one.err && times < 16; ++times) {
      const ssize_t got = ::read(one.err.get(), bytes, sizeof bytes);
      if (got < 0) return;
      if (got == 0) one.err.reset();
      for (const char c : std::string_view(bytes, static_cast<std::size_t>(got))) take(one, c);
    }
  }

  void take(Running& one, char c) {
    one.line += c;
    if (c != '\n' && one.line.size() < kMostKept) return;
    if (one.error.empty() && one.line.starts_with(kError)) {
      one.error = one.line.substr(kError.size());
    } else if (!one.error.empty()) {  // an error may have several lines
      if (one.error.size() < kMostKept) one.error += one.line;
    } else if (&one == &running_.front()) {
      warn_(one.line);
    } else {
      one.said += one.line;
      if (one.said.size() > kMostKept) one.said.erase(0, one.said.size() - kMostKept);
    }
    one.line.clear();
  }

  void reap(Running& one) {
    int status = 0;
    if (one.status || ::waitpid(one.id, &status, WNOHANG) != one.id) return;
    one.status = status;
    read(one);
    if (!one.line.empty()) take(one, '\n');
    one.err.reset();  // a process that it left behind may still have it
    one.link.reset();
    if (!failed(one)) return;
    failed_.push_back(&one);
    if (!deadline_) term_at(patience_.by_itself);
  }

  bool failed(const Running& one) const {
    auto asked = [&](int signal) { return stop_signal_ != 0 ? is_stop(signal) : one.told && signal == SIGTERM; };
    if (WIFSIGNALED(*one.status)) return !one.told && !asked(WTERMSIG(*one.status));
    return WEXITSTATUS(*one.status) != 0 && !asked(WEXITSTATUS(*one.status) - 128);
  }

  void term_at(double seconds) { set_deadline(SIGTERM, seconds); }
  void kill_at(double seconds) { set_deadline(SIGKILL, seconds); }
  void set_deadline(int signal, double seconds) {
    deadline_ = Clock::now() + seconds_of(seconds);
    at_deadline_ = signal;
  }

  void end_late() {
    if (!deadline_ || Clock::now() < *deadline_) return;
    bool killed = false;
    for (Running& one : running_) {
      if (one.status) continue;
      if (at_deadline_ == SIGKILL && !insisted_ && may_finish(one)) continue;
      one.told = true;
      if (at_deadline_ == SIGKILL) ::kill(one.id, SIGKILL), killed = true;
    }
    if (at_deadline_ == SIGTERM) send(SIGTERM);
    if (killed && insisted_)
      warn_(
          "quern: warning: ranks did not end by themselves after a second signal and were killed; steps since the "
          "last checkpoint are lost\n");
    kill_at(at_deadline_ == SIGTERM ? patience_.on_request : kAgain);
  }

  /// What it writes, as long as it runs.
  bool may_finish(Running& one) {
    if (!one.link || !one.link->needs_time()) return false;
    if (!std::exchange(one.given_time, true)) {
      const Running& first = *failed_.front();
      const std::string why = first.error.substr(0, first.error.find('\n'));
      warn_("quern: warning: " + (why.empty() ? first.process->name + " failed" : said_by(first.process->name, why)) +
            "; " + one.process->name + " finishes what it writes\n");
    }
    if (!stands_still(one.id)) return one.stands_since.reset(), true;
    if (!one.stands_since) one.stands_since = Clock::now();
    if (Clock::now() - *one.stands_since < seconds_of(patience_.stopped)) return true;
    warn_("quern: warning: " + one.process->name + " was stopped by a signal while it writes, and is ended\n");
    return false;
  }

  RunEnd verdict() const {
    RunEnd end{.code = stop_signal_ ? 128 + stop_signal_ : 0, .stopped = stop_signal_ != 0, .trained = trained_};
    if (failed_.empty()) return end;
    auto first = std::find_if(failed_.begin(), failed_.end(), [](const Running* one) {
      return WIFSIGNALED(*one->status) || WEXITSTATUS(*one->status) != kCommunication;
    });
    const Running& one = first == failed_.end() ? *failed_.front() : **first;
    const bool killed = WIFSIGNALED(*one.status);
    end.unexplained = !killed && one.error.empty() && WEXITSTATUS(*one.status) == kExitOfLibraries;
    end.code = killed || end.unexplained ? kCommunication : WEXITSTATUS(*one.status);
    end.output = one.said;
    end.cause = one.process->name;
    if (!one.error.empty())
      end.cause = said_by(one.process->name, one.error.substr(0, one.error.find_last_not_of('\n') + 1));
    else if (end.unexplained)
      end.cause += " was ended by a library that it uses, with exit code 1";
    else if (!killed)
      end.cause += " ended with exit code " + std::to_string(end.code);
    else
      end.cause += " was ended by signal " + std::to_string(WTERMSIG(*one.status)) +
                   (WTERMSIG(*one.status) == SIGKILL ? " (out of memory?)" : "");
    return end;
  }

  const std::function<void(const std::string&)>& warn_;
  const Patience patience_;
  SignalQueue signals_;
  std::vector<Running> running_;
  std::vector<const Running*> failed_;  // in the order in which they did
  int stop_signal_ = 0;
  bool trained_ = false;
  std::optional<Clock::time_point> asked_;  // to stop, by a person or a scheduler
  bool insisted_ = false;
  std::optional<Clock::time_point> deadline_;
  int at_deadline_ = 0;
};

}  // namespace

WaitingSignals::WaitingSignals() {
  const sigset_t signals = forwarded_signals();
  ::pthread_sigmask(SIG_BLOCK, &signals, &before_);
}

int waiting_stop() {
  sigset_t waiting;
  ::sigpending(&waiting);
  for (const int signal : kForwardedSignals)
    if (is_stop(signal) && sigismember(&waiting, signal)) return signal;
  return 0;
}

void take_waiting_signals() {
  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal : kForwardedSignals) sigaddset(&signals, signal);
  sigaddset(&signals, SIGCHLD);
  ::pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
}

RunEnd supervise(const std::vector<RankProcess>& processes, const std::function<void(const std::string&)>& warn,
                 const Patience& patience) {
  return Supervisor(processes, warn, patience).run();
}

}  // namespace quern
