#include "run/ranks/split_communicator.h"

#include <utility>

namespace quern {

SplitCommunicator::SplitCommunicator(std::vector<std::unique_ptr<Communicator>> parts, const Choice& choice)
    : CommunicatorParts(std::move(parts)), choice_(choice) {
  traits_.sums_in_rank_order =
      part(choice_.reduce_scatter).traits().sums_in_rank_order && part(choice_.all_reduce).traits().sums_in_rank_order;
}

void SplitCommunicator::connect(const Rendezvous& rendezvous, Device& device) {
  for (std::size_t number = 0; number < count(); ++number) {
    Rendezvous own = rendezvous;
    if (!own.address.empty()) own.address += "-" + part(number).traits().id;
    connect_part(number, own, device);
  }
}

// ---- hot path ----

void SplitCommunicator::all_reduce(const View& in_out, Reduction reduction, Stream stream) {
  part(choice_.all_reduce).all_reduce(in_out, reduction, stream);
}

void SplitCommunicator::reduce_scatter(const View& in, const View& out, Counts counts, Reduction reduction,
                                       Stream stream) {
  part(choice_.reduce_scatter).reduce_scatter(in, out, counts, reduction, stream);
}

void SplitCommunicator::all_gather(const View& in, const View& out, Counts counts, Stream stream) {
  part(choice_.all_gather).all_gather(in, out, counts, stream);
}

}  // namespace quern
