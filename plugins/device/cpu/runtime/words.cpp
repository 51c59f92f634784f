#include "runtime/words.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <ctime>

namespace quern::cpu {

namespace {

/// Who stores a word without waking anybody is noticed this late.
constexpr timespec kLook{.tv_sec = 0, .tv_nsec = 5'000'000};

}  // namespace

void set_word(std::uint32_t* word, std::uint32_t value) {
  std::atomic_ref(*word).store(value, std::memory_order_release);
  ::syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void await_word(const std::uint32_t* word, std::uint32_t mask) {
  std::atomic_ref shared(*const_cast<std::uint32_t*>(word));  // an atomic_ref of const comes with C++26
  for (std::uint32_t seen = shared.load(std::memory_order_acquire); (seen & mask) == 0;
       seen = shared.load(std::memory_order_acquire))
    ::syscall(SYS_futex, word, FUTEX_WAIT, seen, &kLook, nullptr, 0);
}

}  // namespace quern::cpu
