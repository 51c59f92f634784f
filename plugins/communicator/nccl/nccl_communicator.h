#pragma once
// Collectives of NCCL on the streams of the cuda device; they can be captured. NCCL finds peers by an id that rank 0
// makes and the ranks exchange. Sums have the order that NCCL's algorithm has: they repeat on one machine with one
// NCCL. Multicast (NVLink SHARP) is off unless NCCL_NVLS_ENABLE says otherwise.
//
// Faults. NCCL reports faults that it sees (a network that breaks), and does not end waits of a stream for a rank that
// is late or gone: who watches the ranks has to call abort(). Ranks of one machine find the faults of the others at
// their next call, and by error(): also one that is late, whose calls would find what the others had sent before they
// went. Set-up begins with an exchange between hosts, which names a rank that does not come. After abort() no graph
// that holds calls may be launched.

#include <nccl.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "fault_page.h"
#include "options.h"
#include "quern/communicator.h"
#include "shared/collectives/calls.h"
#include "shared/collectives/rank_reduction.h"

namespace quern::nccl {

class NcclCommunicator final : public Communicator {
 public:
  explicit NcclCommunicator(const NcclOptions& options);
  /// Waits for pending calls; after abort() not at all.
  ~NcclCommunicator() override;

  const CommunicatorTraits& traits() const override { return traits_; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }

  void connect(const Rendezvous& rendezvous, Device& device) override;
  void register_buffer(void* memory, std::size_t bytes) override;
  void unregister_buffer(void* memory) override;
  void barrier() override { exchange({}); }

  void all_reduce(const View& in_out, Reduction reduction, Stream stream) override;
  void reduce_scatter(const View& in, const View& out, Counts counts, Reduction reduction, Stream stream) override;
  void all_gather(const View& in, const View& out, Counts counts, Stream stream) override;
  void all_to_all(const View& in, const View& out, Counts counts, Stream stream) override;
  void broadcast(const View& in_out, int root, Stream stream) override;
  void send(const View& in, int to, Stream stream) override;
  void receive(const View& out, int from, Stream stream) override;

  std::optional<std::string> error() override;
  void abort() noexcept override;

 private:
  struct Buffer : collectives::Buffer {
    ncclWindow_t window = nullptr;  // symmetric memory of all ranks
    void* handle = nullptr;         // else of NCCL's registration, where it takes the memory
  };

  /// All ranks' texts; faults of set-up are faults of the group.
  std::vector<std::string> exchange(std::string own);
  ncclUniqueId agree_on_id();
  /// Whether a window can be made of it: on all ranks at one place of equal blocks that NCCL can map.
  bool is_symmetric(void* memory, std::size_t bytes);
  void need_registered(const View& view) const;
  /// Makes a call of NCCL's, unless there is a fault, and waits until NCCL has taken it: not for what it enqueues.
  template <class Work>
  void call(const char* what, const Work& work);
  /// Into `out` the maxima from element `begin` of `in` on, by reduce_ranks: NCCL's own maximum drops NaN.
  void maximum(const View& in, std::int64_t begin, const View& out, Stream stream);
  void copy(const View& out, const View& in, Stream stream);
  void fail(const std::string& text) noexcept;
  /// This rank's, or another's.
  std::optional<std::string> fault();

  const NcclOptions options_;
  static constexpr std::int64_t kPiece = 1 << 16;  // elements of fp32 whose maximum is taken at a time
  static constexpr std::size_t kPieceBytes = kPiece * sizeof(float);
  // NCCL's buffers, by nvidia-smi on two and on four H100 of one host (2.28, its own choice of channels), where shards
  // are equal; sends between three ranks, whose shards are not, took as much again.
  static constexpr std::size_t kBuffers = std::size_t{850} << 20;
  CommunicatorTraits traits_{.id = "nccl",
                             .can_capture = true,
                             .own_bytes = kBuffers + kPieceBytes,
                             .peer_bytes = kPieceBytes,
                             .needs_watchdog = true};
  int rank_ = 0, size_ = 1;
  Device* device_ = nullptr;
  std::function<std::vector<std::string>(std::string own)> exchange_;
  std::vector<Buffer> buffers_;
  std::unique_ptr<collectives::RankReduction> reduction_;
  char* staging_ = nullptr;  // a piece of each rank, and one of the result

  std::timed_mutex mutex_;  // of NCCL's object, whose calls return at once unless a queue of launches is full
  std::atomic<ncclComm_t> comm_ = nullptr;  // null: one rank, not connected, or aborted
  std::mutex fault_mutex_;
  std::optional<std::string> fault_;
  std::unique_ptr<FaultPage> page_;  // null: one rank, or several machines
};

}  // namespace quern::nccl
