// `quern train FILE`: one run from its config to its export. Ctrl-C, SIGTERM, SIGHUP and SIGXCPU save a checkpoint and
// leave with the shell's code for that signal; before the first step, and at a second Ctrl-C or SIGTERM a second later
// or more, the program leaves at once. SIGUSR1 saves and goes on.
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <iostream>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

#include <unistd.h>

#include "base/clock.h"
#include "base/files/descriptor.h"
#include "commands.h"
#include "launch/starter_link.h"
#include "log/background_output.h"
#include "quern/run.h"
#include "start_ranks.h"

namespace quern::cli {

namespace {

enum class Phase { starting, running, over };

RunRequests requests;
std::atomic<Phase> phase{Phase::starting};  // running: there is something to lose
bool has_starter = false;                   // a quern that started this rank
std::atomic<double> told_to_stop{0};        // when a person or a scheduler first did, who may insist; 0: nobody did
constexpr double kInsists = 1;  // seconds: a second signal that comes earlier is the first again (`timeout`)

void handle(int signal) {
  if (signal == SIGUSR1) {
    requests.save = true;
    return;
  }
  int none = 0;
  requests.stop.compare_exchange_strong(none, signal);
  if (phase == Phase::running) {
    // HUP comes from the shell and from the terminal, XCPU each second: neither insists.
    double never = 0;
    if (signal == SIGHUP || signal == SIGXCPU || told_to_stop.compare_exchange_strong(never, now()) ||
        now() - told_to_stop < kInsists)
      return;
    if (has_starter) return;  // which ends its ranks
  } else if (phase == Phase::starting) {
    write_if_taken(STDOUT_FILENO, "stopped before the first step; there is nothing to save\n",
                   std::chrono::milliseconds(0));
  }
  ::_exit(128 + signal);
}

extern "C" void on_signal(int signal) {
  const int kept = errno;
  handle(signal);
  errno = kept;
}

void take(int signal) {
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  ::sigaction(signal, &action, nullptr);
}

void take_signals() {
  // The terminal's Ctrl-C stops the reader of a pipe too, and there is still a checkpoint to write.
  std::signal(SIGPIPE, SIG_IGN);
  if ((has_starter = starter_of_this_rank() != 0)) return hear_starter(handle);
  for (int signal : {SIGINT, SIGTERM, SIGXCPU, SIGUSR1}) take(signal);
  if (std::signal(SIGHUP, SIG_IGN) != SIG_IGN) take(SIGHUP);  // nohup
}

/// Prints what a start is at, when it is at it for long: a first start on a GPU times kernels for minutes.
class StartWatch {
 public:
  StartWatch() : thread_([this](std::stop_token ended) { run(ended); }) {}
  void at(std::string_view phase) {
    std::lock_guard lock(mutex_);
    phase_ = phase;
    since_ = std::chrono::steady_clock::now();
  }

 private:
  void run(const std::stop_token& ended) {
    constexpr std::chrono::seconds kEvery{10};
    std::unique_lock lock(mutex_);
    while (!wake_.wait_for(lock, ended, kEvery, [&] { return ended.stop_requested(); }))
      if (const auto so_far = std::chrono::steady_clock::now() - since_; !phase_.empty() && so_far > kEvery / 2)
        std::cout << phase_ << ": " << std::chrono::duration_cast<std::chrono::seconds>(so_far).count() << " s so far"
                  << std::endl;
  }

  std::mutex mutex_;
  std::condition_variable_any wake_;
  std::string phase_ = "starting";
  std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
  std::jthread thread_;
};

}  // namespace

int train_command(const Arguments& arguments) {
  take_signals();
  std::optional<RunArguments> run =
      parse_run("quern train FILE [--set a.b=v]...", boost::program_options::options_description("options"), arguments);
  if (!run) return 0;
  if (const std::optional<RankPlace> place = rank_place()) {
    take_place(*place, *run);
  } else {
    phase = Phase::over;  // where this starts ranks, they know what a stop finds
    if (const std::optional<int> code = start_ranks(*run, {"train"}, arguments)) return *code;
    phase = Phase::starting;
  }
  std::unique_ptr<BackgroundOutput> output;  // outlives the run's log
  TrainingRun training(run->file, run->overrides);
  output = std::make_unique<BackgroundOutput>(std::cout, STDOUT_FILENO);
  StartWatch watch;
  training.open_for_training(requests, [&](std::string_view now) { watch.at(now); });
  watch.at({});
  std::cout << training.memory_table() << std::endl;
  training.start();
  phase = Phase::running;
  RunResult result = training.train();
  phase = Phase::over;
  for (const std::string& text : result.untold) std::cerr << "quern: warning: " << text << "\n";
  if (!result.finished) std::cout << "stopped at step " << result.step << "; the same command continues\n";
  return requests.stop == 0 ? 0 : 128 + requests.stop;
}

}  // namespace quern::cli
