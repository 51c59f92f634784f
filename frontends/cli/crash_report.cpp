#include "crash_report.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <string>

#include "launch/local_ranks.h"
#include "plugin/plugin_file.h"

namespace quern::cli {

namespace {

constexpr std::array kSignals = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT};
std::atomic_flag reported = ATOMIC_FLAG_INIT;
std::string prefix;  // made before, since memory may be what is broken
alignas(16) std::array<char, 64 << 10> stack;

/// The file of an address in code; null: none is loaded there.
const char* file_of(void* address) {
  Dl_info info;
  return ::dladdr(address, &info) != 0 && info.dli_fname ? info.dli_fname : nullptr;
}

bool is_plugin(const char* file) {
  const char* slash = std::strrchr(file, '/');
  return std::strncmp(slash ? slash + 1 : file, "libquern_", 9) == 0;
}

// Nothing here takes memory, or a lock that the crash may hold but the loader's.
extern "C" void on_crash(int signal, siginfo_t* info, void*) {
  if (!reported.test_and_set()) {
    constexpr int kOwn = 2;  // this function, and what the system returns to from it
    std::array<void*, 64> frames;
    const int depth = ::backtrace(frames.data(), static_cast<int>(frames.size()));
    const char *where = nullptr, *plugin = nullptr;
    for (int i = kOwn; i < depth; ++i) {
      const char* file = file_of(frames[static_cast<std::size_t>(i)]);
      if (file && !where) where = file;
      if (file && !plugin && is_plugin(file)) plugin = file;
    }
    if (!plugin) plugin = PluginAtWork::path();
    std::array<char, 2048> line;
    const int length = std::snprintf(
        line.data(), line.size(), "quern: error: %s%s: crashed: found signal %d (%s) in %s; %s\n", prefix.c_str(),
        plugin ? plugin : "quern", signal, ::sigdescr_np(signal), where ? where : "no library",
        plugin ? "this is a fault in the plugin or in what it calls; please report it to its author"
               : "this is a fault in quern or in a library; please report it");
    const std::size_t bytes = std::min(static_cast<std::size_t>(std::max(length, 0)), line.size() - 1);
    [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), bytes);
  }
  // The system's own action is back. What the processor refused comes again; what was sent does not.
  if (info->si_code <= 0) ::raise(signal);
}

}  // namespace

void report_crashes() {
  prefix = rank_prefix();
  void* warm[1];
  ::backtrace(warm, 1);  // loads the unwinder
  stack_t own{};
  own.ss_sp = stack.data();
  own.ss_size = stack.size();
  ::sigaltstack(&own, nullptr);  // of the main thread, which may have none left
  struct sigaction action {};
  action.sa_sigaction = on_crash;
  action.sa_flags = static_cast<int>(SA_SIGINFO | SA_ONSTACK | SA_RESETHAND);
  for (const int signal : kSignals) ::sigaction(signal, &action, nullptr);
}

}  // namespace quern::cli
