#include "runtime/system_limits.h"

#include <omp.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <latch>
#include <string>
#include <thread>
#include <vector>

#include "products/blas.h"
#include "quern/error.h"

namespace quern::cpu {

namespace {

constexpr std::size_t kStack = std::size_t{256} << 10;      // kernels and the BLAS take up to some 40 KiB
constexpr std::size_t kThreadStack = std::size_t{8} << 20;  // that a system usually gives
constexpr std::size_t kBlasOwn = 2 * kBlasBuffer;           // that it takes as it is loaded, and keeps
constexpr std::size_t kRest = std::size_t{256} << 20;       // libraries, and scratch of kernels

[[noreturn]] void refuse(std::string what, std::string found, std::string expected, std::string next) {
  throw Error(ErrorCode::resources, {.where = "device.cpu.threads",
                                     .what = std::move(what),
                                     .found = std::move(found),
                                     .expected = std::move(expected),
                                     .next = std::move(next)});
}

std::size_t own_stack() {
  pthread_attr_t attributes;
  std::size_t bytes = 0;
  if (::pthread_getattr_np(::pthread_self(), &attributes) != 0) return kStack;
  ::pthread_attr_getstacksize(&attributes, &bytes);
  ::pthread_attr_destroy(&attributes);
  return bytes;
}

}  // namespace

void check_address_space(int threads) {
  const std::size_t all = static_cast<std::size_t>(threads + kOtherStreams);
  const std::size_t bytes = all * (kBlasBuffer + kThreadStack) + kBlasOwn + kRest;
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED)
    refuse("too little address space for " + std::to_string(threads) + " threads", "less",
           std::to_string(bytes >> 20) + " MiB", "take fewer, or raise the limits on memory (ulimit -v, ulimit -d)");
  ::munmap(memory, bytes);
}

// As many as streams and OpenMP will take are started at once, with some for those that a run starts meanwhile: data,
// checkpoints.
void check_threads(int kernel_threads) {
  constexpr int kOthers = 4;
  const auto count = static_cast<std::size_t>(kernel_threads + kOtherStreams + kOthers);
  std::latch enough(1);
  std::vector<std::jthread> threads;
  std::string refusal;
  try {
    while (threads.size() < count) threads.emplace_back([&enough] { enough.wait(); });
  } catch (const std::exception& error) {
    refusal = error.what();
  }
  enough.count_down();
  if (!refusal.empty())
    refuse("no more threads can be started (" + refusal + ")", std::to_string(threads.size() + 1),
           std::to_string(count), "take fewer, or raise the limit on processes and threads (ulimit -u)");
}

std::size_t least_stack(int threads) {
  std::size_t least = own_stack();
#pragma omp parallel num_threads(threads) reduction(min : least)
  least = std::min(least, own_stack());
  return least;
}

void check_stack(std::size_t least) {
  if (least < kStack)
    refuse("too little stack for a thread", std::to_string(least >> 10) + " KiB",
           "at least " + std::to_string(kStack >> 10) + " KiB", "raise ulimit -s, or unset OMP_STACKSIZE");
}

}  // namespace quern::cpu
