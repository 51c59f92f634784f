#include "conformance/harness/growth.h"

#include <malloc.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "conformance/harness/plugin_heap.h"
#include "conformance/report.h"

namespace quern::conformance {

namespace {

struct Held {
  std::int64_t heap = 0, shared = 0, files = 0, threads = 0;  // shared: bytes of mappings
};

std::int64_t entries_of(const char* folder) {
  std::int64_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) ++count;
  return count;
}

std::int64_t shared_bytes() {
  std::int64_t bytes = 0;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::int64_t begin = 0, end = 0;
    char dash = 0;
    std::string rights;
    if (std::istringstream(line) >> std::hex >> begin >> dash >> end >> rights && rights.ends_with('s') &&
        line.find("/dev/nvidia") == std::string::npos)  // the driver's own
      bytes += end - begin;
  }
  return bytes;
}

Held held() {
  const std::int64_t shared = shared_bytes();
  const struct mallinfo2 heap = ::mallinfo2();
  return {static_cast<std::int64_t>(heap.uordblks + heap.hblkhd + guarded_bytes()), shared, entries_of("/proc/self/fd"),
          entries_of("/proc/self/task")};
}

}  // namespace

std::string need_no_growth(const std::string& what, const std::function<void()>& call, const Repeats& repeats) {
  for (int i = 0; i < repeats.first; ++i) call();
  const Held before = held();
  for (int i = 0; i < repeats.calls; ++i) call();
  Held after = held();
  // A thread that was joined is still listed for a moment.
  for (int wait = 0; wait < 200 && (after.threads > before.threads || after.files > before.files); ++wait) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    after = held();
  }
  const std::string text = std::to_string(repeats.calls) + " times " + what;
  need(after.files <= before.files, "open files after " + text, std::to_string(after.files),
       std::to_string(before.files) + ", as before");
  need(after.threads <= before.threads, "threads after " + text, std::to_string(after.threads),
       std::to_string(before.threads) + ", as before");
  need(after.shared <= before.shared, "shared mappings after " + text, std::to_string(after.shared) + " bytes",
       std::to_string(before.shared) + ", as before");
  const std::int64_t growth = after.heap - before.heap;
  need(growth < repeats.most_growth, "heap after " + text, std::to_string(growth) + " bytes more",
       "less than " + std::to_string(repeats.most_growth));
  return text;
}

}  // namespace quern::conformance
