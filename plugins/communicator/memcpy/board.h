#pragma once
// What the ranks tell each other, in memory that all map. Streams signal each other by words of it (Device::write_word,
// wait_word), so that no host is needed while they run, nor for a captured graph. Hosts leave there what they enqueue,
// to be compared, and their faults. A thread of each rank's looks for ranks that are late, gone or at fault; once there
// is a fault it ends all waits of this rank.

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "ledger.h"
#include "meeting.h"
#include "quern/running_time.h"

namespace quern::memcpy {

inline constexpr int kMostRanks = 64;

using collectives::Call;

/// Which of the signals from one rank to another: a call that needs two exchanges has a signal for each. Messages have
/// one of their own, so that a call that is not the peer's cannot take it.
enum class Signal : std::uint8_t { first, second, message };

class Board {
 public:
  /// Collective. `meeting` and the device outlive this.
  Board(Meeting& meeting, const Rendezvous& rendezvous, Device& device);
  /// No stream is held by a signal any more.
  ~Board();
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;

  // ---- before anything of a call is enqueued: a peer that does another one is a fault, found by who comes later ----
  void compare(const Call& call);
  /// A message between this rank and another.
  void compare_message(int from, int to, std::uint64_t bytes);

  // ---- enqueued. A signal is given to a peer, who awaits it, and takes it when done with what it stands for; it must
  // have been taken before it is given again. So each value says all, and a graph can be launched any number of times.
  /// This rank's stream comes to a call. `from`: the rank whose signal alone it awaits; -1: it gives one itself too.
  void begin(Call::Kind kind, int from, Stream stream);
  void give(int to, Signal kind, Stream stream);
  void await(int from, Signal kind, Stream stream);
  void take(int from, Signal kind, Stream stream);
  void await_taken(int to, Signal kind, Stream stream);
  /// No more waits. Comes before the only signal that is awaited is taken.
  void end(Stream stream);

  // ---- faults: from any thread ----
  bool failed() const { return failed_; }
  std::optional<std::string> fault();
  /// The first fault stays; peers get to know it.
  void fail(const std::string& text) noexcept;
  /// The first fault of a peer, so that it can be reported instead of its consequences.
  std::optional<std::string> fault_of_peers() const;

 private:
  static constexpr std::size_t kSignals = 3;
  /// Alone in its cache line.
  struct alignas(64) Word {
    std::uint32_t word;
  };
  enum State : std::uint32_t { kHere, kFailed, kLeft };
  struct Seat {
    Word stage;                                             // where the stream is; the watcher takes it away
    std::array<std::array<Word, kSignals>, kMostRanks> to;  // by peer
    std::atomic<std::uint32_t> state;
    char fault[248];  // written before `state` becomes kFailed
    Ledger<1024> calls;
    std::array<Ledger<16>, kMostRanks> sent, received;  // messages, by peer
  };

  Seat& own() const { return seats_[rank_]; }
  std::uint32_t& signal(int from, int to, Signal kind) const {
    return seats_[from].to[static_cast<std::size_t>(to)][static_cast<std::size_t>(kind)].word;
  }
  template <class Entry>
  void need_same(int peer, const Entry& own, const std::optional<Entry>& other);
  std::string fault_of_group() const;
  bool process_ended(int rank) const;
  // ---- the watcher ----
  void watch(const std::stop_token& stop);
  void look();
  std::vector<std::uint32_t> signals() const;
  bool waits_for(int rank, int peer) const;
  int awaited() const;
  void end_waits() const;

  const int rank_, size_;
  const double timeout_;
  Device& device_;
  Seat* seats_ = nullptr;
  std::size_t bytes_ = 0;          // of all seats, in whole pages
  std::vector<Descriptor> lives_;  // by rank: a pipe whose other end closes when the rank's process ends
  Descriptor own_life_;
  std::mutex mutex_;  // of fault_
  std::string fault_;
  std::atomic<bool> failed_ = false;
  // What the watcher saw last, and since when.
  std::uint32_t stage_ = 0;
  std::vector<std::uint32_t> seen_;
  RunningTime unchanged_;
  std::jthread watcher_;  // the last member: ends first
};

}  // namespace quern::memcpy
