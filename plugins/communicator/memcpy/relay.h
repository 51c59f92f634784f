#pragma once
// The way between ranks that cannot read each other's device memory (GPUs without peer access): what a rank gives goes
// in pieces through a window of host memory that all ranks have pinned, and its peers take it from there.

#include <cstddef>
#include <functional>

#include "board.h"

namespace quern::memcpy {

class Relay {
 public:
  /// Collective. The window of a rank has room for three pieces of `piece` bytes. The rest outlives this.
  Relay(Meeting& meeting, Board& board, Device& device, int rank, int size, std::size_t piece);
  /// No call is pending any more.
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  /// What each rank gives each other in a call.
  struct Flow {
    bool same = false;  ///< a rank gives the same to all others
    /// Known of all pairs that this rank is in.
    std::function<std::size_t(int from, int to)> bytes;
    std::function<const char*(int to)> given;
    /// Enqueues on the stream of the call the use of bytes of a rank from `at` on.
    std::function<void(int from, const char* piece, std::size_t at, std::size_t bytes)> arrive;
    /// All ranks' bytes from `at` to `end`, or to the last of them, have arrived.
    std::function<void(std::size_t at, std::size_t end)> arrived = [](std::size_t, std::size_t) {};
  };
  /// Enqueues a call whose stage is begun. Memory that is given can be written again behind it.
  void run(const Flow& flow, Stream stream);

  /// Where a rank puts pieces of messages; one piece.
  char* message(int rank) const { return window(rank) + 2 * piece_; }

 private:
  char* window(int rank) const { return memory_ + static_cast<std::size_t>(rank) * 3 * piece_; }
  const char* place(int from, int to, bool same, std::size_t round) const;
  void give(const Flow& flow, std::size_t round, Stream stream);
  void take(const Flow& flow, std::size_t round, Stream stream);
  std::size_t most(const Flow& flow) const { return flow.same ? piece_ : share_; }
  std::size_t rounds(const Flow& flow, int peer) const;
  /// Bytes of that round.
  std::size_t left(const Flow& flow, int from, int to, std::size_t round) const;

  Board& board_;
  Device& device_;
  const int rank_, size_;
  const std::size_t piece_, share_;  // bytes for all peers, and for one of them
  char* memory_ = nullptr;
  std::size_t bytes_ = 0;
  Event begun_, given_, taken_[2];
};

}  // namespace quern::memcpy
