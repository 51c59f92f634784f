#pragma once
// Ranks in two levels ([parallel] machines): the ranks of a machine shard state, and machines have copies of it. To the
// run it is a communicator of one machine's ranks, whose sums are over all machines.

#include "run/ranks/communicator_parts.h"

namespace quern {

/// Machine m has the ranks from m * n on, n = size(), of a group of machines * n. Sums go over the ranks of each
/// machine first, so that every element crosses between machines once. Gathers, broadcasts and messages stay in a
/// machine.
class MachinesCommunicator final : public CommunicatorParts {
 public:
  MachinesCommunicator(std::unique_ptr<Communicator> inside, std::unique_ptr<Communicator> across, int ranks,
                       int machines);

  /// Of this machine's ranks alone.
  Communicator& inside() const { return first(); }

  int size() const override { return ranks_ / machines_; }

  /// `rendezvous` is of all ranks.
  void connect(const Rendezvous& rendezvous, Device& device) override;
  void barrier() override;

  void all_reduce(const View& in_out, Reduction reduction, Stream stream) override;
  void reduce_scatter(const View& in, const View& out, Counts counts, Reduction reduction, Stream stream) override;

 private:
  Communicator& across() const { return part(1); }

  const int ranks_, machines_;
};

}  // namespace quern
