#pragma once
// Several communicators as one: some collectives go to another than the rest ([parallel.collectives]).

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "quern/communicator.h"

namespace quern {

/// What does not belong to a collective (a barrier, messages) goes to the first part. Each part connects by itself and
/// knows all buffers. A fault of one part is the fault of all: who hears of it calls abort(), which may take time, for
/// streams that wait in other parts.
class SplitCommunicator final : public Communicator {
 public:
  /// Numbers of parts.
  struct Choice {
    std::size_t all_gather = 0, reduce_scatter = 0, all_reduce = 0;
  };
  SplitCommunicator(std::vector<std::unique_ptr<Communicator>> parts, const Choice& choice);

  /// What holds of all parts, or is needed by one; the id names them all: "nccl+memcpy".
  const CommunicatorTraits& traits() const override { return traits_; }
  int rank() const override { return first().rank(); }
  int size() const override { return first().size(); }

  void connect(const Rendezvous& rendezvous, Device& device) override;
  void register_buffer(void* memory, std::size_t bytes) override;
  void unregister_buffer(void* memory) override;
  void barrier() override { first().barrier(); }

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
  Communicator& first() const { return *parts_[0]; }

  const std::vector<std::unique_ptr<Communicator>> parts_;
  const Choice choice_;
  CommunicatorTraits traits_;
  std::mutex mutex_;  // of fault_
  std::optional<std::string> fault_;
};

}  // namespace quern
