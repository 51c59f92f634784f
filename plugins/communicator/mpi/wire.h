#pragma once
// Messages between the ranks of a group. No wait is MPI's: requests are tested, with longer and longer sleeps between,
// until they are done, the time-out is over, a rank of this machine has ended, or a rank says that it gave up or left.
// All but the first are the group's fault from then on.

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "shared/collectives/calls.h"
#include "world.h"

namespace quern::mpi {

struct Transfer {
  int peer;
  char* memory;
  std::size_t bytes;
};
/// Kinds of messages, each with an order of its own.
enum class Channel : int { data, calls, barrier, notices };

class Wire {
 public:
  /// Collective.
  explicit Wire(const Rendezvous& rendezvous);
  /// After leave(), or a fault.
  ~Wire();
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;

  /// Moves all of these; false: there is a fault, and MPI may still use the memory. `what` is for the fault's text.
  bool move(Channel channel, const std::vector<Transfer>& out, const std::vector<Transfer>& in,
            const std::string& what);
  /// Says what this rank is about to do, and compares it with what all others are; by one thread at a time.
  bool meet(const collectives::Call& call);
  bool barrier();
  /// Tells peers that this rank makes no more calls, and waits until they say so too.
  void leave();

  /// Hears peers' notices, and looks whether their processes live.
  void look() noexcept;
  bool failed() const { return failed_; }
  std::optional<std::string> fault() const;
  /// The first fault stays.
  void fail(const std::string& text) noexcept;
  /// Once there is a fault: lets peers know, which takes little time and may fail.
  void tell() noexcept;

 private:
  struct Notice {
    char fault[248];  // empty: the rank leaves
  };
  /// Memory that MPI may use after a fault.
  struct Letters {
    collectives::Call own;
    std::vector<collectives::Call> calls;
    Notice sent, heard;
  };
  struct Pending;

  void listen();
  void hear(int peer);
  bool done(Pending& pending);
  bool process_ended(int peer) const;
  std::vector<Transfer> empty_messages() const;

  const int rank_, size_;
  const double timeout_;
  MPI_Comm group_ = MPI_COMM_NULL;
  std::unique_ptr<Letters> letters_;
  std::vector<int> processes_;  // descriptors, by rank; -1: not of this machine
  std::mutex look_mutex_;
  MPI_Request notice_ = MPI_REQUEST_NULL;
  std::unique_ptr<std::atomic<bool>[]> left_;  // by rank
  std::atomic<int> heard_ = 0;
  mutable std::mutex mutex_;  // of fault_
  std::string fault_;
  std::atomic<bool> failed_ = false;
};

}  // namespace quern::mpi
