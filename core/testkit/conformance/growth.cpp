#include "conformance/growth.h"

#include <malloc.h>

#include <filesystem>

#include "conformance/plugin_heap.h"
#include "conformance/report.h"

namespace quern::conformance {

namespace {

constexpr int kFirst = 100, kCalls = 1000;
/// Bytes of heap a call: less than the least that malloc gives, more than what its caches and amortized arrays take.
constexpr std::int64_t kMostGrowth = 24;

struct Held {
  std::int64_t heap = 0, files = 0, threads = 0;
};

std::int64_t entries_of(const char* folder) {
  std::int64_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) ++count;
  return count;
}

Held held() {
  const struct mallinfo2 heap = ::mallinfo2();
  return {static_cast<std::int64_t>(heap.uordblks + heap.hblkhd + guarded_bytes()), entries_of("/proc/self/fd"),
          entries_of("/proc/self/task")};
}

}  // namespace

std::string need_no_growth(const std::string& what, const std::function<void()>& call) {
  for (int i = 0; i < kFirst; ++i) call();
  const Held before = held();
  for (int i = 0; i < kCalls; ++i) call();
  const Held after = held();
  const std::string calls = std::to_string(kCalls) + " times " + what;
  need(after.files <= before.files, "open files after " + calls, std::to_string(after.files),
       std::to_string(before.files) + ", as before");
  need(after.threads <= before.threads, "threads after " + calls, std::to_string(after.threads),
       std::to_string(before.threads) + ", as before");
  const std::int64_t growth = after.heap - before.heap;
  need(growth < kMostGrowth * kCalls, "heap after " + calls, std::to_string(growth) + " bytes more",
       "less than " + std::to_string(kMostGrowth) + " a call");
  return calls;
}

}  // namespace quern::conformance
