#include "board.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <ctime>

#include "quern/error.h"

namespace quern::memcpy {

namespace {

using Clock = std::chrono::steady_clock;

/// A sleeper looks this often whether its peers are alive, and whether a wake-up was too early to reach it.
constexpr long kLook = 50'000'000;  // ns

long futex(const std::atomic<std::uint32_t>& word, int what, std::uint32_t value, const timespec* time) noexcept {
  return ::syscall(SYS_futex, reinterpret_cast<const std::uint32_t*>(&word), what, value, time, nullptr, 0);
}

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ErrorCode::resources, {.where = "communicator memcpy", .what = what, .found = std::strerror(errno)});
}

}  // namespace

static_assert(std::atomic<std::uint32_t>::is_always_lock_free && sizeof(std::atomic<std::uint32_t>) == 4);

Board::Board(Meeting& meeting, const Rendezvous& rendezvous)
    : rank_(rendezvous.rank), size_(rendezvous.size), timeout_(rendezvous.timeout) {
  const std::size_t bytes = sizeof(Seat) * static_cast<std::size_t>(size_);
  Descriptor memory;
  if (rank_ == 0) {
    memory = Descriptor(::memfd_create("quern", MFD_CLOEXEC));
    if (!memory || ::ftruncate(memory.get(), static_cast<off_t>(bytes)) != 0) refuse("no shared memory");
  }
  memory = std::move(meeting.exchange({.descriptor = std::move(memory)})[0].descriptor);
  void* mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0);
  if (mapped == MAP_FAILED) refuse("shared memory cannot be mapped");
  seats_ = static_cast<Seat*>(mapped);  // zeros, which are a seat's first state
  int ends[2] = {-1, -1};
  if (::pipe2(ends, O_CLOEXEC) != 0) refuse("no pipe");
  own_life_ = Descriptor(ends[1]);
  for (Message& message : meeting.exchange({.descriptor = Descriptor(ends[0])}))
    lives_.push_back(std::move(message.descriptor));
}

Board::~Board() {
  std::uint32_t here = kHere;
  own().state.compare_exchange_strong(here, kLeft);
  wake_all();
  ::munmap(seats_, sizeof(Seat) * static_cast<std::size_t>(size_));
}

void Board::meet(const std::optional<Call>& call) {
  if (failed_ || size_ == 1) return;
  if (call) own().call = *call;
  const std::uint32_t here = own().arrived + 1;
  raise(own().arrived);
  for (int step = 1; step < size_; ++step) {
    const int peer = (rank_ + step) % size_;
    if (!wait(seats_[peer].arrived, here, peer, "come to a collective")) return;
    if (call && seats_[peer].call != *call) return fail(collectives::difference(peer, seats_[peer].call, rank_, *call));
  }
}

void Board::give(int to, std::uint64_t bytes) {
  if (failed_) return;
  const auto peer = static_cast<std::size_t>(to), self = static_cast<std::size_t>(rank_);
  own().sizes[peer] = bytes;
  raise(own().given[peer]);
  wait(seats_[to].taken[self], own().given[peer], to, "receive what was sent");
}

void Board::expect(int from, std::uint64_t bytes) {
  if (failed_) return;
  const auto peer = static_cast<std::size_t>(from), self = static_cast<std::size_t>(rank_);
  if (!wait(seats_[from].given[self], own().taken[peer] + 1, from, "send what is to be received")) return;
  if (const std::uint64_t sent = seats_[from].sizes[self]; sent != bytes)
    fail(who(from) + " sends another size: found " + std::to_string(sent) + " bytes, where rank " +
         std::to_string(rank_) + " receives " + std::to_string(bytes));
}

void Board::took(int from) {
  if (!failed_) raise(own().taken[static_cast<std::size_t>(from)]);
}

std::optional<std::string> Board::fault() {
  if (!failed_)
    for (int peer = 0; peer < size_; ++peer)
      if (peer != rank_ && process_ended(peer) && seats_[peer].state != kLeft) fail(fault_now(peer));
  if (!failed_) return std::nullopt;
  const std::lock_guard lock(mutex_);
  return fault_;
}

void Board::fail(const std::string& text) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (failed_) return;
    fault_ = text;
    failed_ = true;
    Seat& seat = own();
    const std::size_t kept = text.copy(seat.fault, sizeof seat.fault - 1);
    seat.fault[kept] = 0;
    seat.state = kFailed;
  }
  wake_all();
}

std::optional<std::string> Board::fault_of_peers() const {
  for (int peer = 0; peer < size_; ++peer)
    if (peer != rank_ && seats_[peer].state == kFailed)
      return std::string(seats_[peer].fault, ::strnlen(seats_[peer].fault, sizeof(Seat::fault)));
  return std::nullopt;
}

/// Why a wait for `peer` is in vain; empty where it is not.
std::string Board::fault_now(int peer) const {
  if (auto fault = fault_of_peers()) return *fault;
  for (int rank = 0; rank < size_; ++rank)
    if (rank != rank_ && process_ended(rank) && seats_[rank].state == kHere)
      return who(rank) + " is gone: its process ended";
  return seats_[peer].state == kLeft ? who(peer) + " left the group" : "";
}

bool Board::wait(const Word& word, std::uint32_t value, int peer, const char* what) {
  const auto deadline =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_));
  for (;;) {
    auto reached = [&] { return static_cast<std::int32_t>(word.load() - value) >= 0; };
    const std::uint32_t seen = word;
    if (reached()) return true;
    if (failed_) return false;
    if (const std::string fault = fault_now(peer); !fault.empty()) {
      if (reached()) return true;  // its last deed
      fail(fault);
      return false;
    }
    if (Clock::now() > deadline) {
      char seconds[32];
      std::snprintf(seconds, sizeof seconds, "%g s", timeout_);
      fail(who(peer) + " did not " + what + " within " + seconds);
      return false;
    }
    const timespec time{.tv_sec = 0, .tv_nsec = kLook};
    futex(word, FUTEX_WAIT, seen, &time);
  }
}

bool Board::process_ended(int rank) const {
  pollfd life{.fd = lives_[static_cast<std::size_t>(rank)].get(), .events = 0, .revents = 0};
  return ::poll(&life, 1, 0) == 1 && (life.revents & POLLHUP) != 0;
}

void Board::raise(Word& word) {
  ++word;
  futex(word, FUTEX_WAKE, INT_MAX, nullptr);
}

/// Sleepers look again: this rank's, and peers' that wait for this one.
void Board::wake_all() noexcept {
  for (int rank = 0; rank < size_; ++rank) {
    Seat& seat = seats_[rank];
    futex(seat.arrived, FUTEX_WAKE, INT_MAX, nullptr);
    for (int peer = 0; peer < size_; ++peer)
      for (const Word& word : {std::cref(seat.given[static_cast<std::size_t>(peer)]),
                               std::cref(seat.taken[static_cast<std::size_t>(peer)])})
        futex(word, FUTEX_WAKE, INT_MAX, nullptr);
  }
}

}  // namespace quern::memcpy
