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

#include "conformance/harness/plugin_heap.h"
#include "launch/local_ranks.h"
#include "plugin/plugin_file.h"

namespace quern::cli {

namespace {

constexpr std::array kSignals = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT};
std::atomic_flag reported = ATOMIC_FLAG_INIT;
std::string prefix;  // made before, since memory may be broken
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

/// Where the frames of a crash are: the first that is known, and the plugin that had called it, or null.
struct Place {
  const char* file = nullptr;
  const char* plugin = PluginAtWork::path();
};
[[gnu::noinline]] Place place_of_crash() {
  constexpr int kOwn = 3;  // this function, the handler, and what the system returns to from that
  std::array<void*, 64> frames;
  const int depth = ::backtrace(frames.data(), static_cast<int>(frames.size()));
  Place place;
  for (int i = depth; i-- > kOwn;) {
    const char* file = file_of(frames[static_cast<std::size_t>(i)]);
    if (!file) continue;
    place.file = file;
    if (is_plugin(file)) place.plugin = file;
  }
  return place;
}

// Takes no memory, and no lock but the loader's.
extern "C" void on_crash(int signal, siginfo_t* info, void*) {
  while (reported.test_and_set()) ::pause();  // the first thread's crash ends the program
  ::alarm(5);                                 // also where the crash holds that lock
  std::array<char, 2048> line;
  int length = 0;
  if (info->si_code <= 0 && info->si_pid != ::getpid()) {  // abort() sends it to its own process
    length = std::snprintf(line.data(), line.size(), "quern: error: %sended by signal %d (%s), which process %d sent\n",
                           prefix.c_str(), signal, ::sigdescr_np(signal), static_cast<int>(info->si_pid));
  } else {
    const Place place = place_of_crash();
    const char* block = signal == SIGSEGV ? conformance::guarded_block_at(info->si_addr) : nullptr;
    length = std::snprintf(
        line.data(), line.size(), "quern: error: %s%s: crashed: found signal %d (%s) in %s%s%s; %s\n", prefix.c_str(),
        place.plugin ? place.plugin : "quern", signal, ::sigdescr_np(signal), place.file ? place.file : "no library",
        block ? ", " : "", block ? block : "",
        place.plugin ? "this is a fault in the plugin or in a library that it calls; please report it to its author"
                     : "this is a fault in quern or in a library; please report it");
  }
  const std::size_t bytes = std::min(static_cast<std::size_t>(std::max(length, 0)), line.size() - 1);
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), bytes);
  std::signal(signal, SIG_DFL);
  if (info->si_code <= 0) ::raise(signal);  // it was sent; what the processor refused comes again
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
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (const int signal : kSignals) ::sigaddset(&action.sa_mask, signal);  // one within ends the program
  for (const int signal : kSignals) ::sigaction(signal, &action, nullptr);
}

}  // namespace quern::cli
