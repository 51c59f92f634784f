#include "board.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <cerrno>
#include <climits>
#include <condition_variable>
#include <cstdio>
#include <cstring>

#include "quern/error.h"

namespace quern::memcpy {

namespace {

/// Values of a signal: a bit each, so that a wait can be for either. Both end every wait.
constexpr std::uint32_t kGiven = 1, kTaken = 2, kEnded = 0xFFFFFFFF;

/// Values of a stage: bit 0 in a call, of the kind in the bits from 1 on, which awaits the rank before that in the bits
/// from 8 on. None is 0, which the watcher leaves.
constexpr std::uint32_t kInCall = 1, kIdle = 2;
constexpr int kKindAt = 1, kFromAt = 8;

Call::Kind kind_of(std::uint32_t stage) { return static_cast<Call::Kind>((stage >> kKindAt) & 0x7F); }

constexpr std::chrono::microseconds kLook{20'000}, kLookAtFault{200};

std::atomic_ref<std::uint32_t> shared(std::uint32_t& word) { return std::atomic_ref(word); }

void wake(std::uint32_t& word) noexcept { ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

std::string who(int rank) { return "rank " + std::to_string(rank); }

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ErrorCode::resources, {.where = "communicator memcpy", .what = what, .found = std::strerror(errno)});
}

}  // namespace

Board::Board(Meeting& meeting, const Rendezvous& rendezvous, Device& device)
    : rank_(rendezvous.rank), size_(rendezvous.size), timeout_(rendezvous.timeout), device_(device) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  bytes_ = (sizeof(Seat) * static_cast<std::size_t>(size_) + page - 1) / page * page;
  Descriptor memory;
  if (rank_ == 0) {
    memory = Descriptor(::memfd_create("quern", MFD_CLOEXEC));
    if (!memory || ::ftruncate(memory.get(), static_cast<off_t>(bytes_)) != 0) refuse("no shared memory");
  }
  memory = std::move(meeting.exchange({.descriptor = std::move(memory)})[0].descriptor);
  void* mapped = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0);
  if (mapped == MAP_FAILED) refuse("shared memory cannot be mapped");
  seats_ = static_cast<Seat*>(mapped);  // zeros, which are a seat's first state but for its signals
  for (auto& peer : own().to)
    for (Word& signal : peer) shared(signal.word) = kTaken;
  device_.pin(seats_, bytes_);
  int ends[2] = {-1, -1};
  if (::pipe2(ends, O_CLOEXEC) != 0) refuse("no pipe");
  own_life_ = Descriptor(ends[1]);
  for (Message& message : meeting.exchange({.descriptor = Descriptor(ends[0])}))
    lives_.push_back(std::move(message.descriptor));
  unchanged_ = {};
  sigset_t all, before;
  ::sigfillset(&all);  // signals are the main thread's
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  watcher_ = std::jthread([this](const std::stop_token& stop) { watch(stop); });
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Board::~Board() {
  device_.unpin(seats_);
  watcher_.request_stop();
  watcher_.join();
  std::uint32_t here = kHere;
  own().state.compare_exchange_strong(here, kLeft);
  ::munmap(seats_, bytes_);
}

// ---- enqueued calls, compared ----

template <class Entry>
void Board::need_same(int peer, const Entry& own, const std::optional<Entry>& other) {
  if (!other || other->history == own.history) return;
  if (other->call == own.call)
    fail(who(peer) + " did something else than rank " + std::to_string(rank_) + ", before " + own.call.text());
  else
    fail(collectives::difference(peer, other->call, rank_, own.call));
}

void Board::compare(const Call& call) {
  const std::uint64_t number = own().calls.add(call);
  for (int peer = 0; peer < size_; ++peer)
    if (peer != rank_) need_same(peer, *own().calls.find(number), seats_[peer].calls.find(number));
}

void Board::compare_message(int from, int to, std::uint64_t bytes) {
  auto& sent = seats_[from].sent[static_cast<std::size_t>(to)];
  auto& received = seats_[to].received[static_cast<std::size_t>(from)];
  auto& mine = rank_ == from ? sent : received;
  const auto& other = rank_ == from ? received : sent;
  Call call{};
  call.kind = Call::Kind::message;
  call.dtype = static_cast<std::uint32_t>(DType::u8);
  call.elements = bytes;
  const std::uint64_t number = mine.add(call);
  need_same(rank_ == from ? to : from, *mine.find(number), other.find(number));
}

// ---- signals ----

void Board::begin(Call::Kind kind, int from, Stream stream) {
  const std::uint32_t stage =
      kInCall | static_cast<std::uint32_t>(kind) << kKindAt | static_cast<std::uint32_t>(from + 1) << kFromAt;
  device_.write_word(&own().stage.word, stage, stream);
}

void Board::give(int to, Signal kind, Stream stream) { device_.write_word(&signal(rank_, to, kind), kGiven, stream); }

void Board::await(int from, Signal kind, Stream stream) {
  device_.wait_word(&signal(from, rank_, kind), kGiven, stream);
}

void Board::take(int from, Signal kind, Stream stream) {
  device_.write_word(&signal(from, rank_, kind), kTaken, stream);
}

void Board::await_taken(int to, Signal kind, Stream stream) {
  device_.wait_word(&signal(rank_, to, kind), kTaken, stream);
}

void Board::end(Stream stream) { device_.write_word(&own().stage.word, kIdle, stream); }

// ---- faults ----

std::optional<std::string> Board::fault() {
  if (!failed_)
    if (const std::string fault = fault_of_group(); !fault.empty()) fail(fault);
  if (!failed_) return std::nullopt;
  const std::lock_guard lock(mutex_);
  return fault_;
}

void Board::fail(const std::string& text) noexcept {
  const std::lock_guard lock(mutex_);
  if (failed_) return;
  fault_ = text;
  Seat& seat = own();
  const std::size_t kept = text.copy(seat.fault, sizeof seat.fault - 1);
  seat.fault[kept] = 0;
  seat.state = kFailed;
  failed_ = true;  // only now are waits ended: a peer that goes on because of it finds the fault
}

std::optional<std::string> Board::fault_of_peers() const {
  for (int peer = 0; peer < size_; ++peer)
    if (peer != rank_ && seats_[peer].state == kFailed)
      return std::string(seats_[peer].fault, ::strnlen(seats_[peer].fault, sizeof(Seat::fault)));
  return std::nullopt;
}

/// Why the group cannot go on, whatever this rank does; empty where it can.
std::string Board::fault_of_group() const {
  if (auto fault = fault_of_peers()) return *fault;
  for (int rank = 0; rank < size_; ++rank)
    if (rank != rank_ && process_ended(rank) && seats_[rank].state == kHere)
      return who(rank) + " is gone: its process ended";
  return fault_of_peers().value_or("");  // of one that ended since
}

bool Board::process_ended(int rank) const {
  pollfd life{.fd = lives_[static_cast<std::size_t>(rank)].get(), .events = 0, .revents = 0};
  return ::poll(&life, 1, 0) == 1 && (life.revents & POLLHUP) != 0;
}

// ---- the watcher ----

void Board::watch(const std::stop_token& stop) {
  std::mutex mutex;
  std::condition_variable_any never;
  std::unique_lock lock(mutex);
  while (!stop.stop_requested()) {
    if (failed_)
      end_waits();
    else
      look();
    never.wait_for(lock, stop, failed_ ? kLookAtFault : kLook, [] { return false; });
  }
}

void Board::look() {
  if (const std::string fault = fault_of_group(); !fault.empty()) return fail(fault);
  // Read before the stage: who left had its signals taken, and this rank's stream is past that call then.
  std::array<bool, kMostRanks> left{};
  for (int peer = 0; peer < size_; ++peer) left[static_cast<std::size_t>(peer)] = seats_[peer].state == kLeft;
  const std::uint32_t stage = shared(own().stage.word).exchange(0);
  if (stage != 0) stage_ = stage;
  std::vector<std::uint32_t> now = signals();
  if (stage != 0 || now != seen_) unchanged_ = {};
  seen_ = std::move(now);
  const double waited = unchanged_.look();
  const int peer = awaited();
  if (peer < 0) return;
  if (left[static_cast<std::size_t>(peer)]) return fail(who(peer) + " left the group");
  if (waited < timeout_) return;
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%g s", timeout_);
  fail(who(peer) + " did not do its part of " + name_of(kind_of(stage_)) + " within " + seconds);
}

/// The words of all signals from and to this rank.
std::vector<std::uint32_t> Board::signals() const {
  std::vector<std::uint32_t> words;
  for (const Signal kind : {Signal::first, Signal::second, Signal::message})
    for (int peer = 0; peer < size_; ++peer)
      for (std::uint32_t* word : {&signal(rank_, peer, kind), &signal(peer, rank_, kind)})
        words.push_back(shared(*word));
  return words;
}

/// Whether the rank has given what the peer did not take yet.
bool Board::waits_for(int rank, int peer) const {
  const auto given = [&](Signal kind) { return shared(signal(rank, peer, kind)) == kGiven; };
  return given(Signal::first) || given(Signal::second) || given(Signal::message);
}

/// A rank for which this rank's stream waits, if there is one that itself waits for nobody; -1: for none.
int Board::awaited() const {
  if ((stage_ & kInCall) == 0) return -1;
  if (const int from = static_cast<int>(stage_ >> kFromAt) - 1; from >= 0) {
    const Signal kind = kind_of(stage_) == Call::Kind::message ? Signal::message : Signal::first;
    return shared(signal(from, rank_, kind)) == kGiven ? -1 : from;
  }
  int found = -1;
  for (int peer = 0; peer < size_; ++peer) {
    if (!waits_for(rank_, peer)) continue;
    found = peer;
    bool waits = false;
    for (int other = 0; other < size_; ++other) waits = waits || waits_for(peer, other);
    if (!waits) break;
  }
  return found;
}

/// A stream may overwrite these words, so this is repeated.
void Board::end_waits() const {
  for (const Signal kind : {Signal::first, Signal::second, Signal::message})
    for (int peer = 0; peer < size_; ++peer)
      for (std::uint32_t* word : {&signal(rank_, peer, kind), &signal(peer, rank_, kind)})
        if (shared(*word) != kEnded) shared(*word) = kEnded, wake(*word);
}

}  // namespace quern::memcpy
