#include "run/ranks/split_communicator.h"

#include <algorithm>
#include <utility>

#include "quern/error.h"

namespace quern {

SplitCommunicator::SplitCommunicator(std::vector<std::unique_ptr<Communicator>> parts, const Choice& choice)
    : parts_(std::move(parts)), choice_(choice) {
  traits_.can_capture = true;
  for (const auto& part : parts_) {
    const CommunicatorTraits& traits = part->traits();
    traits_.id += (traits_.id.empty() ? "" : "+") + traits.id;
    traits_.can_capture = traits_.can_capture && traits.can_capture;
    traits_.needs_watchdog = traits_.needs_watchdog || traits.needs_watchdog;
    traits_.most_ranks = std::min(traits_.most_ranks, traits.most_ranks);
    if (!traits.sums_by.empty()) traits_.sums_by += (traits_.sums_by.empty() ? "" : "; ") + traits.sums_by;
    if (traits_.launcher.empty()) traits_.launcher = traits.launcher;
    traits_.own_bytes += traits.own_bytes;
    traits_.peer_bytes += traits.peer_bytes;
  }
  traits_.sums_in_rank_order = parts_[choice_.reduce_scatter]->traits().sums_in_rank_order &&
                               parts_[choice_.all_reduce]->traits().sums_in_rank_order;
}

// ---- set-up ----

void SplitCommunicator::connect(const Rendezvous& rendezvous, Device& device) {
  for (const auto& part : parts_) {
    Rendezvous own = rendezvous;
    if (!own.address.empty()) own.address += "-" + part->traits().id;
    part->connect(own, device);
    const std::vector<std::string>& warnings = part->traits().warnings;
    traits_.warnings.insert(traits_.warnings.end(), warnings.begin(), warnings.end());
    if (part->rank() != rendezvous.rank || part->size() != rendezvous.size)
      throw Error(ErrorCode::communication, {.where = "communicator " + part->traits().id,
                                             .what = "connected as another rank than the run's other communicators"});
  }
}

void SplitCommunicator::register_buffer(void* memory, std::size_t bytes) {
  for (const auto& part : parts_) part->register_buffer(memory, bytes);
}

void SplitCommunicator::unregister_buffer(void* memory) {
  for (const auto& part : parts_) part->unregister_buffer(memory);
}

// ---- hot path ----

void SplitCommunicator::all_reduce(const View& in_out, Reduction reduction, Stream stream) {
  parts_[choice_.all_reduce]->all_reduce(in_out, reduction, stream);
}

void SplitCommunicator::reduce_scatter(const View& in, const View& out, Counts counts, Reduction reduction,
                                       Stream stream) {
  parts_[choice_.reduce_scatter]->reduce_scatter(in, out, counts, reduction, stream);
}

void SplitCommunicator::all_gather(const View& in, const View& out, Counts counts, Stream stream) {
  parts_[choice_.all_gather]->all_gather(in, out, counts, stream);
}

void SplitCommunicator::all_to_all(const View& in, const View& out, Counts counts, Stream stream) {
  first().all_to_all(in, out, counts, stream);
}

void SplitCommunicator::broadcast(const View& in_out, int root, Stream stream) {
  first().broadcast(in_out, root, stream);
}

void SplitCommunicator::send(const View& in, int to, Stream stream) { first().send(in, to, stream); }

void SplitCommunicator::receive(const View& out, int from, Stream stream) { first().receive(out, from, stream); }

// ---- faults ----

std::optional<std::string> SplitCommunicator::error() {
  const std::lock_guard lock(mutex_);
  for (const auto& part : parts_)
    if (!fault_)
      if (const auto fault = part->error()) fault_ = part->traits().id + ": " + *fault;
  return fault_;
}

void SplitCommunicator::abort() noexcept {
  for (const auto& part : parts_) part->abort();
}

}  // namespace quern
