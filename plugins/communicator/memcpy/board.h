#pragma once
// What the ranks tell each other while their streams run: counters in memory that all map, on which a rank sleeps until
// a peer has come as far. Every wait ends by a time-out, by a rank that is gone or gave up, or by abort; all of these
// are the group's fault from then on.

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "meeting.h"
#include "shared/collectives/calls.h"

namespace quern::memcpy {

inline constexpr int kMostRanks = 64;

using collectives::Call;

/// Beside the last three groups of members, every function is work of a stream: it may block, and does nothing once
/// there is a fault.
class Board {
 public:
  /// Collective. The meeting outlives this.
  Board(Meeting& meeting, const Rendezvous& rendezvous);
  ~Board();
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;

  /// Says that this rank's stream is here, about to do `call`, or done with a part of one, and waits for all others.
  void meet(const std::optional<Call>& call);

  // ---- pieces from one rank to another: in the sender's memory, from `give` until the peer's `took` ----
  /// The next piece of a message of `bytes` is there; waits until the peer took it.
  void give(int to, std::uint64_t bytes);
  void expect(int from, std::uint64_t bytes);
  void took(int from);

  // ---- the host, from any thread ----
  bool failed() const { return failed_; }
  std::optional<std::string> fault();
  /// The first fault stays; peers get to know it.
  void fail(const std::string& text) noexcept;
  /// The first fault of a peer, so that it can be told instead of what followed from it.
  std::optional<std::string> fault_of_peers() const;

 private:
  using Word = std::atomic<std::uint32_t>;
  enum State : std::uint32_t { kHere, kFailed, kLeft };
  struct Seat {
    alignas(64) Word state, arrived;
    Call call;        // written before `arrived` is raised, read before its reader raises its own
    char fault[248];  // written before `state` becomes kFailed
    alignas(64) std::array<Word, kMostRanks> given, taken;  // pieces, by peer
    std::array<std::uint64_t, kMostRanks> sizes;            // of the message, by peer
  };

  Seat& own() const { return seats_[rank_]; }
  std::string who(int rank) const { return "rank " + std::to_string(rank); }
  /// Until `word` of `peer` has come to `value`; false: there is a fault.
  bool wait(const Word& word, std::uint32_t value, int peer, const char* what);
  std::string fault_now(int peer) const;
  bool process_ended(int rank) const;
  void raise(Word& word);
  void wake_all() noexcept;

  const int rank_, size_;
  const double timeout_;
  Seat* seats_ = nullptr;
  std::vector<Descriptor> lives_;  // by rank: a pipe whose other end closes when the rank's process ends
  Descriptor own_life_;
  std::mutex mutex_;  // of fault_
  std::string fault_;
  std::atomic<bool> failed_ = false;
};

}  // namespace quern::memcpy
