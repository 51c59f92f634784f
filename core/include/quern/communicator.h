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
  /// Device memory that it takes beside the arena: own_bytes, and peer_bytes for each rank.
  std::size_t own_bytes = 0, peer_bytes = 0;
  /// Sums add rank 0's elements, then rank 1's, and so on, in fp32 (f64: in f64), and round once: the bits of any other
  /// communicator that says so.
  bool sums_in_rank_order = false;
  /// Else what their order depends on beside the devices and sizes, "NCCL 2.28.9, ...": ranks have to have the same, and
  /// checkpoints keep it, so that a run that goes on with another says so.
  std::string sums_by = {};
  /// Streams wait for a rank that is late or gone until abort() is called: who runs the ranks has to watch them.
  bool needs_watchdog = false;
  int most_ranks = std::numeric_limits<int>::max();  ///< that a group may have
  std::string launcher = {};  ///< the program that has to start the ranks, "mpirun"; empty: any way will do
};

/// How ranks find each other; works across processes.
struct Rendezvous {
  int rank = 0;
  int size = 1;
  /// "file:/path", in a folder that only the user can enter and all ranks of this machine see; empty: the ranks are on
  /// several machines.
  std::string address;
  double timeout = 60;  ///< seconds that any wait for another rank may take: to connect, on a stream, at a barrier
  /// What each rank gave, by rank; collective, between hosts, for set-up alone. Throws a communication error that names
  /// a rank. Empty where ranks can find each other by the address only; else used until the communicator is destroyed.
  std::function<std::vector<std::string>(std::string own)> exchange = {};
};

/// Elements of the slabs into which a view is cut, one after another, by rank; 0 is allowed. Empty: equal slabs.
using Counts = std::span<const std::int64_t>;

/// A group of ranks; some of them are a group of their own through another object, connected by them alone.
///
/// Calls. All ranks make the same collective calls in the same order, with the same counts, dtypes and places: a view
/// begins at the same byte of the same registered buffer on every rank. The calls go to one stream, or to several that
/// events order like the calls. Each is ordered on its stream like a kernel, and the buffers are borrowed until the
/// stream has passed it: then peers have read them too, and they may be used again.
///
/// In place. `in` is the part of `out` where its slab goes, or `out` that of `in` where it is taken from: allowed in
/// all_gather and reduce_scatter. Other overlaps are not.
///
/// Dtypes. What only moves takes any. Sums: f32, bf16, f64. Maximum: f32; NaN if an element is NaN. A sum's order is
/// fixed by size and rank, so results repeat bit for bit, and all ranks get the same bits.
///
/// Threads. All but error() and abort() are called by one thread at a time, that which enqueues to the device.
///
/// Faults. A wait beyond the time-out, a rank that is gone or gave up, or another call than on a peer, is a fault: the
/// text that error() returns from then on, which names the rank. Streams go on, and what a failed call should have
/// written is undefined; calls that follow do nothing, and barrier() throws. There is no way back but a new object.
/// Where traits().needs_watchdog, waits on streams have no time-out, and no fault need name the rank.
/// A call that is wrong by itself (a dtype, a size, memory that is not registered) throws an internal error at once.
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
  /// Makes device memory known to peers, once per buffer and before capture. It stays the caller's.
  virtual void register_buffer(void* memory, std::size_t bytes) = 0;
  /// Before the memory is released; no call that uses it is pending.
  virtual void unregister_buffer(void* memory) = 0;
  /// Blocks the host until all ranks are here. What is on streams need not be done.
  virtual void barrier() = 0;

  // ---- hot path: enqueued ----
  virtual void all_reduce(const View& in_out, Reduction reduction, Stream stream) = 0;
  /// `out` is this rank's slab of the sum over all ranks' `in`; `counts` cuts `in`.
  virtual void reduce_scatter(const View& in, const View& out, Counts counts, Reduction reduction, Stream stream) = 0;
  /// `out` is the slabs of all ranks, `in` this rank's; `counts` cuts `out`.
  virtual void all_gather(const View& in, const View& out, Counts counts, Stream stream) = 0;
  /// The slabs of `in` go to the ranks, those of `out` come from them. `counts` is (size, size): of rank i for rank j
  /// at i * size + j.
  virtual void all_to_all(const View& in, const View& out, Counts counts, Stream stream) = 0;
  virtual void broadcast(const View& in_out, int root, Stream stream) = 0;
  /// Between two ranks alone, from any place to any place of the same size. The stream may wait until the peer's stream
  /// has come to the other call: of two ranks that exchange, one receives first.
  virtual void send(const View& in, int to, Stream stream) = 0;
  virtual void receive(const View& out, int from, Stream stream) = 0;

  // ---- faults: from any thread, without blocking ----
  /// The first fault, if there is one.
  virtual std::optional<std::string> error() = 0;
  /// Ends all waits of this rank, which counts as a fault, and lets its peers know.
  virtual void abort() noexcept = 0;
};

}  // namespace quern
