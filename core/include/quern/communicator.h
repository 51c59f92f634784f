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

/// How ranks find each other; works across processes.
struct Rendezvous {
  int rank = 0;
  int size = 1;
  /// "file:/path" of a file that is not there yet, another for each group, in a folder that only the user can enter and
  /// that all ranks of this machine share; the caller removes the folder. Empty: the ranks are on several machines.
  std::string address;
  double timeout = 60;  ///< seconds that any wait for another rank may take: to connect, on a stream, at a barrier
  /// Gathers a text from each rank, by rank; collective, between hosts, for set-up only. Throws a communication error
  /// that names a rank. Empty if ranks have only the address; otherwise valid until the communicator is destroyed,
  /// beside an address too.
  std::function<std::vector<std::string>(std::string own)> exchange = {};
};

/// Number of elements of each rank's slab of a view, in rank order; 0 is allowed. Empty: equal slabs.
using Counts = std::span<const std::int64_t>;

/// A group of ranks. A subgroup is another object, which only its ranks connect.
///
/// Calls. All ranks make the same collective calls in the same order, with the same counts, dtypes and places: a view
/// begins at the same byte of the same registered buffer on every rank. Calls are on one stream, or on several that
/// events order like the calls. Each is ordered on its stream like a kernel, and its buffers are borrowed until it
/// completes there; peers have read them by then, so they can be reused.
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
/// waits on streams have no time-out, and a fault need not name the rank. A rank whose barrier times out while others
/// wait for it in a call names a rank too, perhaps itself. An invalid call (a dtype, a size, memory that is not
/// registered) throws an internal error at once.
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
  /// Registers device memory with all peers, once per buffer and before capture. The caller keeps ownership.
  virtual void register_buffer(void* memory, std::size_t bytes) = 0;
  /// Called before the memory is released, when no call that uses it is pending.
  virtual void unregister_buffer(void* memory) = 0;
  /// Blocks the host until all ranks have called it. Does not wait for streams.
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
  /// Between two ranks, from any place to any place of the same size. The stream may wait until the peer's stream
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
