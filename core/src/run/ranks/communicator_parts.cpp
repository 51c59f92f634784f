#include "run/ranks/communicator_parts.h"

#include <algorithm>

#include "quern/error.h"

namespace quern {

CommunicatorParts::CommunicatorParts(std::vector<std::unique_ptr<Communicator>> parts) : parts_(std::move(parts)) {
  traits_.can_capture = true;
  for (const auto& part : parts_) {
    const CommunicatorTraits& traits = part->traits();
    names_.push_back(traits.id);
    traits_.id += (traits_.id.empty() ? "" : "+") + traits.id;
    traits_.can_capture = traits_.can_capture && traits.can_capture;
    traits_.needs_watchdog = traits_.needs_watchdog || traits.needs_watchdog;
    traits_.most_ranks = std::min(traits_.most_ranks, traits.most_ranks);
    if (!traits.sums_by.empty()) traits_.sums_by += (traits_.sums_by.empty() ? "" : "; ") + traits.sums_by;
    if (traits_.launcher.empty()) traits_.launcher = traits.launcher;
    traits_.own_bytes += traits.own_bytes;
    traits_.peer_bytes += traits.peer_bytes;
  }
}

void CommunicatorParts::connect_part(std::size_t number, const Rendezvous& rendezvous, Device& device) {
  Communicator& part = *parts_[number];
  part.connect(rendezvous, device);
  if (part.rank() != rendezvous.rank || part.size() != rendezvous.size)
    throw Error(ErrorCode::communication, {.where = "communicator " + part.traits().id,
                                           .what = "connected as another rank than the run's other communicators"});
  const std::vector<std::string>& warnings = part.traits().warnings;
  traits_.warnings.insert(traits_.warnings.end(), warnings.begin(), warnings.end());
}

void CommunicatorParts::register_buffer(void* memory, std::size_t bytes) {
  for (const auto& part : parts_) part->register_buffer(memory, bytes);
}

void CommunicatorParts::unregister_buffer(void* memory) {
  for (const auto& part : parts_) part->unregister_buffer(memory);
}

std::optional<std::string> CommunicatorParts::error() {
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < parts_.size(); ++i)
    if (!fault_)
      if (const auto fault = parts_[i]->error()) fault_ = names_[i] + ": " + *fault;
  return fault_;
}

void CommunicatorParts::abort() noexcept {
  for (const auto& part : parts_) part->abort();
}

}  // namespace quern
