#include "stop_signals.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <mutex>

#include "base/clock.h"
#include "launch/starter_link.h"

namespace quern::python {

namespace {

constexpr double kInsists = 1;  // seconds: a second signal that comes earlier is the first again

struct Taken {
  std::atomic<RunRequests*> by{nullptr};
  std::atomic<double> came_at{0};  // 0: not yet
};
std::array<Taken, NSIG> taken;

extern "C" void on_signal(int signal) {
  Taken& own = taken[static_cast<std::size_t>(signal)];
  double never = 0;
  if (own.came_at.compare_exchange_strong(never, now())) {
    if (RunRequests* requests = own.by) requests->stop = signal;
  } else if (now() - never >= kInsists) {
    ::_exit(128 + signal);
  }
}

struct sigaction action_of(int signal) {
  struct sigaction action {};
  ::sigaction(signal, nullptr, &action);
  return action;
}

bool has_handler(int signal, void (*handler)(int)) {
  const struct sigaction action = action_of(signal);
  return (action.sa_flags & SA_SIGINFO) == 0 && action.sa_handler == handler;
}

}  // namespace

StopSignals::StopSignals(RunRequests& requests, std::initializer_list<int> signals) {
  for (int signal : signals) {
    Taken& own = taken[static_cast<std::size_t>(signal)];
    RunRequests* none = nullptr;
    if (has_handler(signal, SIG_IGN) || !own.by.compare_exchange_strong(none, &requests)) continue;
    own.came_at = 0;
    before_.emplace_back(signal, action_of(signal));
    struct sigaction action {};
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESTART;
    ::sigaction(signal, &action, nullptr);
  }
}

StopSignals::~StopSignals() {
  for (const auto& [signal, before] : before_) {
    ::sigaction(signal, &before, nullptr);
    Taken& own = taken[static_cast<std::size_t>(signal)];
    own.by = nullptr;
    if (own.came_at > 0) ::raise(signal);
  }
}

void hear_starter(RunRequests* requests) {
  static std::atomic<RunRequests*> hearer{nullptr};
  static std::once_flag heard;
  hearer = requests;
  std::call_once(heard, [] {
    quern::hear_starter([](int signal) {
      RunRequests* run = hearer;
      if (signal == SIGUSR1 && run)
        run->save = true;
      else if (run)
        run->stop = signal;
      else if (signal != SIGUSR1)
        ::_exit(128 + signal);
    });
  });
}

void release_signals() {
  for (int signal : {SIGTERM, SIGHUP, SIGXCPU}) {
    if (has_handler(signal, on_signal)) ::signal(signal, SIG_DFL);
    taken[static_cast<std::size_t>(signal)].by = nullptr;
  }
}

bool is_default(int signal) { return has_handler(signal, SIG_DFL); }

}  // namespace quern::python
