#pragma once
// Several communicators as one: some collectives go to another than the rest ([parallel.collectives]).

#include <memory>
#include <vector>

#include "run/ranks/communicator_parts.h"

namespace quern {

/// What does not belong to a collective (a barrier, messages) goes to the first part.
class SplitCommunicator final : public CommunicatorParts {
 public:
  /// Numbers of parts.
  struct Choice {
    std::size_t all_gather = 0, reduce_scatter = 0, all_reduce = 0;
  };
  SplitCommunicator(std::vector<std::unique_ptr<Communicator>> parts, const Choice& choice);

  void connect(const Rendezvous& rendezvous, Device& device) override;

  void all_reduce(const View& in_out, Reduction reduction, Stream stream) override;
  void reduce_scatter(const View& in, const View& out, Counts counts, Reduction reduction, Stream stream) override;
  void all_gather(const View& in, const View& out, Counts counts, Stream stream) override;

 private:
  const Choice choice_;
};

}  // namespace quern
