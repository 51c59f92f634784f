#pragma once
// Collectives between ranks, one process a device. Implementations: nccl, memcpy (mapped memory, copy engines), mpi.

#include <cstddef>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "quern/device.h"
#include "quern/view.h"

namespace quern {

enum class Reduction : std::uint8_t { sum, maximum };

struct CommunicatorTraits {
  std::string id;
  bool can_capture = false;  ///< collectives may be part of a captured graph
  /// Device memory outside the arena: own_bytes, and peer_bytes for each rank.
  std::size_t own_bytes = 0, peer_bytes = 0;
  /// Sums add rank 0's elements, then rank 1's, and so on, in fp32 (f64: in f64), and round once: the same bits as
  /// every other communicator with this trait.
  bool sums_in_rank_order = false;
  /// Otherwise what their order depends on beside devices and sizes, "NCCL 2.28.9, ...": all ranks must have the same,
  /// checkpoints record it, and a resumed run reports a change.
  std::string sums_by = {};
  /// Streams wait for a late or missing rank until abort() is called: the caller must watch the ranks.
  bool needs_watchdog = false;
  int most_ranks = std::numeric_limits<int>::max();  ///< largest group
  std::string launcher = {};                         ///< program that must start the ranks, "mpirun"; empty: any
  std::vector<std::string> warnings = {};  ///< once connected: why it is slower than it could be, each with the fix
};

/// How the ranks of a group, each a process, find each other.
struct Rendezvous {
  int rank = 0;
  int size = 1;
  /// "file:/PATH" if all ranks run on this machine, empty if they run on several. PATH is a file that does not exist
  /// yet; each group has its own. Only this user can enter its folder, which the caller removes.
  std::string address;
  double timeout = 60;  ///< seconds that any wait for another rank may take: in connect, on a stream, in a barrier
  /// All-gathers a string over the hosts, in rank order; collective, for set-up only. Throws a communication error that
  /// names a rank. May be empty; otherwise valid until the communicator is destroyed. Several ranks without the one of
  /// `address` and `exchange` that their communicator needs are a config error; one rank needs neither.
  std::function<std::vector<std::string>(std::string own)> exchange = {};
};

/// Number of elements of each rank's slab of a view, in rank order; 0 is allowed. Empty: equal slabs.
using Counts = std::span<const std::int64_t>;

/// A group of ranks. A subgroup is another object, which only its ranks connect. Destroyed, it leaves nothing behind.
///
/// Calls. All ranks make the same collective calls in the same order, with equal counts and dtypes, and with each view
/// at the same offset of the same registered buffer. If calls use several streams, events keep them in that order. A
/// call runs in stream order, like a kernel, and borrows its buffers until it completes on the stream. Peers have read
/// them by then, so they can be overwritten.
///
/// In place. In all_gather `in` may be this rank's slab of `out`, and in reduce_scatter `out` may be this rank's slab
/// of `in`. Other overlaps are not allowed.
///
/// Dtypes. Collectives without reduction accept any. Sums: f32, bf16, f64. Maximum: f32; NaN if an element is NaN. The
/// order of a sum depends only on size and rank, so results repeat bit for bit and are equal on all ranks.
///
/// Threads. All methods except error() and abort() are called only from the thread that enqueues work.
///
/// Faults. A wait beyond the time-out, a rank that ended or aborted, or a call that differs from a peer's, is a fault:
/// error() returns its text from then on, which names the rank. Streams continue, outputs of failed calls are
/// undefined, later calls do nothing, and barrier() throws. Recovery needs a new object. With traits().needs_watchdog,
/// waits on streams have no time-out, and a fault need not name the rank. If a rank is in barrier() while its peers
/// wait for it in a call, the barrier times out and names a rank, which may be the caller. An invalid call (a dtype, a
/// size, a rank, memory that is not registered) throws an internal error at once.
class Communicator {
 public:
  virtual ~Communicator() = default;

  // ---- capabilities ----
  virtual const CommunicatorTraits& traits() const = 0;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // ---- set-up: collective; each waits for all ranks, or throws a communication error that names one ----
  /// `device` is open and outlives this object.
  virtual void connect(const Rendezvous& rendezvous, Device& device) = 0;
  /// Registers the caller's device memory with all peers: once per buffer, in one order on all ranks, before capture.
  virtual void register_buffer(void* memory, std::size_t bytes) = 0;
  /// Called before the memory is released, when no call that uses it is pending.
  virtual void unregister_buffer(void* memory) = 0;
  /// Blocks the calling thread until all ranks have called barrier(). Does not synchronize streams.
  virtual void barrier() = 0;

  // ---- hot path: enqueued ----
  virtual void all_reduce(const View& in_out, Reduction reduction, Stream stream) = 0;
  /// `out` is this rank's slab of the sum over all ranks' `in`; `counts` cuts `in`.
  virtual void reduce_scatter(const View& in, const View& out, Counts counts, Reduction reduction, Stream stream) = 0;
  /// `out` gets the slabs of all ranks, `in` is this rank's slab; `counts` cuts `out`.
  virtual void all_gather(const View& in, const View& out, Counts counts, Stream stream) = 0;
  /// Sends slab j of `in` to rank j and receives slab i of `out` from rank i. `counts` is (size, size): elements from
  /// rank i to rank j at i * size + j.
  virtual void all_to_all(const View& in, const View& out, Counts counts, Stream stream) = 0;
  virtual void broadcast(const View& in_out, int root, Stream stream) = 0;
  /// Point to point, between views of one size in any registered buffers. The stream may wait until the peer's stream
  /// reaches the matching call, so when two ranks exchange, one must receive first.
  virtual void send(const View& in, int to, Stream stream) = 0;
  virtual void receive(const View& out, int from, Stream stream) = 0;

  // ---- faults: from any thread, without blocking ----
  /// The first fault, if there is one.
  virtual std::optional<std::string> error() = 0;
  /// Ends all waits of this rank, which is a fault, and notifies its peers.
  virtual void abort() noexcept = 0;
};

}  // namespace quern
