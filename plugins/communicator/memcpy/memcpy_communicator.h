#pragma once
// Collectives by copies between memories that ranks of one machine map from each other: every rank pulls what it needs
// from where the others have it. Sums bring the ranks' pieces together and run the op reduce_ranks on them, while the
// next pieces are on their way. The order between ranks is kept by signals of the streams (board.h). Where a rank
// cannot read another's memory, all copies go through host memory (relay.h).

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "board.h"
#include "meeting.h"
#include "options.h"
#include "quern/communicator.h"
#include "relay.h"
#include "shared/collectives/calls.h"
#include "shared/collectives/rank_reduction.h"

namespace quern::memcpy {

class MemcpyCommunicator final : public Communicator {
 public:
  explicit MemcpyCommunicator(const MemcpyOptions& options)
      : piece_(static_cast<std::size_t>(options.piece_kib) << 10),
        through_(options.through),
        traits_{.id = "memcpy",
                .can_capture = true,
                .own_bytes = piece_,
                .peer_bytes = 2 * piece_,
                .sums_in_rank_order = true,
                .most_ranks = kMostRanks} {}
  /// Waits for pending calls, which after abort() end at once.
  ~MemcpyCommunicator() override;

  const CommunicatorTraits& traits() const override { return traits_; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }

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
  struct Buffer : collectives::Buffer {
    std::vector<char*> peers = {};  // where they are mapped here, by rank; none for this one
  };
  using Place = collectives::Place;
  using Slab = collectives::Slab;

  std::vector<Message> exchange(Message own);
  Buffer share(void* memory, std::size_t bytes);
  /// Where the memories that all ranks gave are mapped here, by rank; none of those that gave nothing.
  std::vector<char*> import_all(const std::vector<Message>& all);
  /// Chooses peers' device memory or the relay, the same on all ranks.
  void choose_way();
  /// Why this rank cannot read all peers' staging memory; empty if it can. Collective.
  std::string reach_peers();
  /// Why copies from a peer's memory cannot be used: they give other bytes than it has. Collective.
  std::string check_copies(std::string reason);
  Place place_of(const View& view) const;
  /// The rank's address of element `at` of the view at `place` here.
  char* at(Place place, int rank, std::int64_t at, DType dtype) const;
  /// Whether there is anything to do; from then on `stream` is known.
  bool begins(Stream stream);
  /// The peers, from the next rank on, so that not all pull from one.
  std::vector<int> peers() const;
  void copy(void* to, const void* from, std::int64_t count, DType dtype, Stream stream);
  /// The elements that the rank has there.
  void copy(void* to, Place place, int from, Slab slab, DType dtype, Stream stream);

  // ---- parts of a call ----
  /// False: a peer does another call, and nothing is to be enqueued.
  bool enter(const Call& call, Stream stream);
  void give_all(Signal kind, Stream stream);
  /// Has `pull` enqueue the copies from each peer once that has given this.
  void pull_all(Signal kind, Stream stream, const std::function<void(int from)>& pull);
  std::int64_t piece_of(const Slab& slab, DType dtype) const;
  /// Elements [slab) of what all ranks have at `place`, into `out`.
  void reduce(Place place, Slab slab, const View& out, Reduction reduction, Stream stream);
  void reduce_small(Place place, const View& in_out, Reduction reduction, Stream stream);
  /// As the parts above, through the relay.
  void relay_sum(Place place, const std::vector<Slab>& slabs, const View& out, Reduction reduction, Stream stream);
  void relay_gather(Place place, const std::vector<Slab>& slabs, DType dtype, Stream stream);
  /// Until peers have taken all signals up to this one.
  void leave(Signal last, Stream stream);

  const std::size_t piece_;  // bytes
  const std::string through_;
  CommunicatorTraits traits_;
  int rank_ = 0, size_ = 1;
  Device* device_ = nullptr;
  std::unique_ptr<Meeting> meeting_;
  std::unique_ptr<Board> board_;     // none in a group of one
  std::atomic<bool> ended_ = false;  // by abort() of a group of one
  std::unique_ptr<Relay> relay_;     // none where ranks read each other's memory
  char* staging_ = nullptr;          // two times a piece of each rank, to be summed, and one to be sent
  char* window_ = nullptr;           // the last of these, or of the relay
  Event begun_, summed_;
  std::vector<Buffer> buffers_;  // the first is the staging; an unregistered one keeps its number
  std::unique_ptr<collectives::RankReduction> reduction_;
  std::vector<Stream> streams_;  // that have seen calls
};

}  // namespace quern::memcpy
