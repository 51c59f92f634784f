// `quern train FILE`: one run from its config to its export. Ctrl-C or SIGTERM saves a checkpoint and leaves with the
// shell's code for that signal; before the first step, and when it is the second one, it leaves at once.
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <iostream>

#include <unistd.h>

#include "commands.h"
#include "config/document.h"
#include "config/resolve.h"
#include "plan/report.h"
#include "quern/error.h"
#include "train/run_schemas.h"
#include "train/trainer.h"

namespace quern::cli {

namespace {

std::atomic<int> stop_signal{0};
std::atomic<bool> started{false};  // from here on there is something to lose

extern "C" void on_signal(int signal) {
  if (stop_signal.exchange(signal) == 0 && started.load()) return;
  if (!started.load()) {
    constexpr char kText[] = "stopped before the first step; there is nothing to save\n";
    [[maybe_unused]] ssize_t ignored = ::write(STDOUT_FILENO, kText, sizeof kText - 1);
  }
  ::_exit(128 + signal);
}

}  // namespace

int train_command(const Arguments& arguments) {
  // The terminal's Ctrl-C stops the reader of a pipe too, and there is still a checkpoint to write.
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGINT, on_signal);
  std::signal(SIGTERM, on_signal);
  std::optional<RunArguments> run =
      parse_run("quern train FILE [--set a.b=v]...", boost::program_options::options_description("options"), arguments);
  if (!run) return 0;
  PluginHost host = run_host();
  ResolvedConfig config = resolve(run->document, run_schemas(), host);
  Session session(config, host);
  Trainer trainer(session, host, stop_signal);
  std::cout << memory_table(trainer.plan()) << std::endl;
  trainer.start();
  started = true;
  RunResult result = trainer.run();
  if (!result.finished) std::cout << "stopped at step " << result.step << "; the same command continues\n";
  return stop_signal.load() == 0 ? 0 : 128 + stop_signal.load();
}

}  // namespace quern::cli
