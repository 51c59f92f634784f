#pragma once
// Collectives between ranks, one process a device. Implementations: nccl, memcpy (copy engines), mpi.

#include <cstddef>
#include <optional>
#include <span>
#include <string>

#include "quern/device.h"
#include "quern/view.h"

namespace quern {

enum class Reduction : std::uint8_t { sum, maximum };

struct CommunicatorTraits {
  std::string id;
  bool can_capture = false;  ///< collectives may be part of a captured graph
  bool needs_peer_access = false;
  bool host_staged = false;  ///< data passes through host memory
};

/// How ranks find each other; works across processes.
struct Rendezvous {
  int rank = 0;
  int size = 1;
  std::string address;  ///< "file:/path" or "tcp:host:port"; the launcher fills it in
};

/// All collectives are called by all ranks in the same order and are ordered on `stream`. Buffers are borrowed until
/// the stream has passed the call. Sums run in an order fixed by size and rank, so results repeat bit for bit.
class Communicator {
 public:
  virtual ~Communicator() = default;

  // ---- capabilities ----
  virtual const CommunicatorTraits& traits() const = 0;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // ---- set-up: collective ----
  virtual void connect(const Rendezvous& rendezvous, Device& device) = 0;
  /// Makes memory known to peers; before capture, once per buffer.
  virtual void register_buffer(void* memory, std::size_t bytes) = 0;

  // ---- hot path: f32 and bf16, the dtypes of gradients, and f64, of loss sums; others are optional ----
  virtual void all_reduce(const View& in_out, Reduction reduction, Stream stream) = 0;
  /// `out` is this rank's slab: in.count() / size elements.
  virtual void reduce_scatter(const View& in, const View& out, Reduction reduction, Stream stream) = 0;
  virtual void all_gather(const View& in, const View& out, Stream stream) = 0;
  virtual void all_to_all(const View& in, const View& out, Stream stream) = 0;
  virtual void broadcast(const View& in_out, int root, Stream stream) = 0;
  /// Blocks the host until all ranks are here, or throws a communication error after the time-out.
  virtual void barrier() = 0;

  // ---- faults ----
  /// A fault seen since the last call, without blocking.
  virtual std::optional<std::string> error() = 0;
  /// Ends all pending collectives on this rank so that the process can leave.
  virtual void abort() noexcept = 0;
};

}  // namespace quern
