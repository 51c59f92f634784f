#include "relay.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "quern/error.h"

namespace quern::memcpy {

namespace {

constexpr std::size_t kAligned = 16;

Signal signal_of(std::size_t round) { return round % 2 == 0 ? Signal::first : Signal::second; }

[[noreturn]] void refuse(std::size_t bytes) {
  throw Error(ErrorCode::resources,
              {.where = "communicator memcpy",
               .what = "no host memory through which ranks reach each other",
               .found = std::to_string(bytes) + " bytes: " + std::strerror(errno),
               .next = "set a smaller parallel.memcpy.piece_kib, or choose another communicator"});
}

}  // namespace

Relay::Relay(Meeting& meeting, Board& board, Device& device, int rank, int size, std::size_t piece)
    : board_(board),
      device_(device),
      rank_(rank),
      size_(size),
      piece_(piece),
      share_(std::max(kAligned, piece / static_cast<std::size_t>(size - 1) / kAligned * kAligned)) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::size_t whole = static_cast<std::size_t>(size) * 3 * piece_;
  const std::size_t bytes = (whole + page - 1) / page * page;
  Descriptor memory;
  if (rank_ == 0) {
    memory = Descriptor(::memfd_create("quern", MFD_CLOEXEC));
    if (!memory || ::ftruncate(memory.get(), static_cast<off_t>(bytes)) != 0) refuse(bytes);
  }
  memory = std::move(meeting.exchange({.descriptor = std::move(memory)})[0].descriptor);
  void* mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0);
  if (mapped == MAP_FAILED) refuse(bytes);
  memory_ = static_cast<char*>(mapped);
  bytes_ = bytes;
  try {
    device_.pin(memory_, bytes_);
  } catch (...) {
    ::munmap(memory_, bytes_);
    throw;
  }
  for (Event* event : {&begun_, &given_, &taken_[0], &taken_[1]}) *event = device_.make_event();
}

Relay::~Relay() {
  device_.unpin(memory_);
  ::munmap(memory_, bytes_);
}

/// Both sides of a pair give as often, nothing if need be, so that each knows for whom it waits.
std::size_t Relay::rounds(const Flow& flow, int peer) const {
  const std::size_t bytes = std::max(flow.bytes(rank_, peer), flow.bytes(peer, rank_));
  return std::max<std::size_t>(1, (bytes + most(flow) - 1) / most(flow));
}

std::size_t Relay::left(const Flow& flow, int from, int to, std::size_t round) const {
  const std::size_t bytes = flow.bytes(from, to), at = round * most(flow);
  return bytes > at ? std::min(most(flow), bytes - at) : 0;
}

/// Rounds have halves of the window alternately, and each peer its part of a half.
const char* Relay::place(int from, int to, bool same, std::size_t round) const {
  const char* half = window(from) + (round % 2) * piece_;
  return same ? half : half + static_cast<std::size_t>(to < from ? to : to - 1) * share_;
}

void Relay::give(const Flow& flow, std::size_t round, Stream stream) {
  const Signal kind = signal_of(round);
  bool copied = false;
  for (int step = 1; step < size_; ++step)
    if (const int peer = (rank_ + step) % size_; round < rounds(flow, peer))
      board_.await_taken(peer, kind, stream);  // what the round before the last had here
  for (int step = 1; step < size_; ++step) {
    const int peer = (rank_ + step) % size_;
    if (round >= rounds(flow, peer)) continue;
    if (const std::size_t bytes = left(flow, rank_, peer, round); bytes > 0 && !copied) {
      device_.copy(const_cast<char*>(place(rank_, peer, flow.same, round)), flow.given(peer) + round * most(flow),
                   bytes, stream);
      copied = flow.same;
    }
    board_.give(peer, kind, stream);
  }
}

void Relay::take(const Flow& flow, std::size_t round, Stream stream) {
  const Signal kind = signal_of(round);
  for (int step = 1; step < size_; ++step) {
    const int from = (rank_ + step) % size_;
    if (round >= rounds(flow, from)) continue;
    board_.await(from, kind, stream);
    if (const std::size_t bytes = left(flow, from, rank_, round); bytes > 0)
      flow.arrive(from, place(from, rank_, flow.same, round), round * most(flow), bytes);
    board_.take(from, kind, stream);
  }
  flow.arrived(round * most(flow), (round + 1) * most(flow));
}

/// One stream gives while the other takes the round before, so that both directions of the link are busy. A rank gives
/// a round before it takes it, and takes a round before it gives the second after it: so ranks that do one thing at a
/// time do not wait for each other in a circle.
void Relay::run(const Flow& flow, Stream stream) {
  const Stream giving = device_.stream(StreamKind::copy_out);
  std::size_t last = 0;
  for (int peer = 0; peer < size_; ++peer)
    if (peer != rank_) last = std::max(last, rounds(flow, peer));
  device_.record(begun_, stream);
  device_.wait(giving, begun_);
  for (std::size_t round = 0; round < last; ++round) {
    if (round >= 2) device_.wait(giving, taken_[round % 2]);
    give(flow, round, giving);
    device_.record(given_, giving);
    device_.wait(stream, given_);
    take(flow, round, stream);
    device_.record(taken_[round % 2], stream);
  }
}

}  // namespace quern::memcpy
