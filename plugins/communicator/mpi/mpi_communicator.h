#pragma once
// Collectives by messages of MPI, through pinned host memory: pieces are copied on the stream while a thread moves
// those before; or directly, where MPI reads and writes the device's memory. Sums bring the ranks' pieces together and
// run the op reduce_ranks on them.

#include <atomic>
#include <memory>
#include <vector>

#include "options.h"
#include "progress.h"
#include "quern/communicator.h"
#include "shared/collectives/calls.h"
#include "shared/collectives/rank_reduction.h"

namespace quern::mpi {

class MpiCommunicator final : public Communicator {
 public:
  explicit MpiCommunicator(const MpiOptions& options)
      : piece_(static_cast<std::size_t>(options.piece_kib) << 10),
        traits_{.id = "mpi",
                .peer_bytes = options.staging == "pinned" ? piece_ : 2 * piece_,
                .sums_in_rank_order = true,
                .launcher = "mpirun"},
        staging_option_(options.staging) {}
  /// Waits for pending calls, and for all ranks to come here; after a fault for neither.
  ~MpiCommunicator() override;

  const CommunicatorTraits& traits() const override { return traits_; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }

  /// The first one starts MPI, which waits for all ranks of mpirun.
  void connect(const Rendezvous& rendezvous, Device& device) override;
  void register_buffer(void* memory, std::size_t bytes) override;
  void unregister_buffer(void* memory) override;
  void barrier() override;

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
  using Call = collectives::Call;
  using Slab = collectives::Slab;

  /// What a collective moves, in device memory.
  struct Exchange {
    std::optional<Call> call = {};  // none: between two ranks
    std::vector<Transfer> out = {}, in = {};
    std::function<void(std::size_t round)> use = {};  // of what came to in_slot or landing; none: it goes to `in`
  };

  /// Whether there is anything to do; from then on `stream` is known.
  bool begins(Stream stream);
  Call call(Call::Kind kind, const View& whole, std::uint32_t detail, Counts counts, const View& registered) const;
  /// Pinned memory of what goes to a rank in a round, or comes from it.
  char* out_slot(std::size_t round, int rank) const { return slot(round, rank); }
  char* in_slot(std::size_t round, int rank) const { return slot(round, size_ + rank); }
  char* slot(std::size_t round, int number) const;
  /// The place of all ranks' pieces for a round's sum, one behind the other.
  char* landing(std::size_t round) const;
  void move(const Exchange& exchange, Stream stream);
  void post(const Exchange& exchange, std::size_t round, Stream stream);
  /// `number`: of the round among all that were posted.
  void take(const Exchange& exchange, std::size_t round, std::uint64_t number, Stream stream);
  /// This rank's slab of all ranks' `in` into `out`.
  void reduce(const Call& call, const View& in, const std::vector<Slab>& slabs, const View& out, Reduction reduction,
              Stream stream);
  void gather(const Call& call, const View& out, const std::vector<Slab>& slabs, Stream stream);
  void copy(void* to, const void* from, std::size_t bytes, Stream stream);

  const std::size_t piece_;  // bytes
  const CommunicatorTraits traits_;
  const std::string staging_option_;
  int rank_ = 0, size_ = 1;
  Device* device_ = nullptr;
  bool direct_ = false;       // MPI reads and writes the device's memory
  char* pinned_ = nullptr;    // two sets of slots, so that one is copied while the other is on its way; null: direct
  char* staging_ = nullptr;   // a piece of each rank, to be summed; twice, where messages come to it
  std::uint64_t posted_ = 0;  // rounds
  std::vector<collectives::Buffer> buffers_;
  std::vector<Stream> streams_;  // that have seen calls
  std::unique_ptr<collectives::RankReduction> reduction_;
  std::unique_ptr<Wire> wire_;       // null: one rank
  std::atomic<bool> ended_ = false;  // by abort() of one rank
  std::unique_ptr<Progress> progress_;
};

}  // namespace quern::mpi
