#include "run/ranks.h"

#include <exception>

#include "quern/error.h"

namespace quern {

namespace {

std::string name_of(const Communicator& communicator) { return "communicator " + communicator.traits().id; }

std::string place_of(int rank, int size) { return "rank " + std::to_string(rank) + " of " + std::to_string(size); }

}  // namespace

Ranks::Ranks(Communicator* communicator, const Rendezvous& rendezvous, Device& device, Engine& engine)
    : communicator_(communicator), engine_(engine), unwinding_(std::uncaught_exceptions()) {
  if (!communicator_) return;
  communicator_->connect(rendezvous, device);
  if (communicator_->rank() != rendezvous.rank || communicator_->size() != rendezvous.size)
    throw Error(ErrorCode::communication, {.where = name_of(*communicator_),
                                           .what = "connected as another rank than it was asked to be",
                                           .found = place_of(communicator_->rank(), communicator_->size()),
                                           .expected = place_of(rendezvous.rank, rendezvous.size),
                                           .next = "this is a fault in the plugin; please report it to its author"});
  engine_.join(*communicator_);
  communicator_->barrier();
}

Ranks::~Ranks() {
  if (communicator_ && std::uncaught_exceptions() > unwinding_) communicator_->abort();
}

void Ranks::reduce() {
  if (communicator_) engine_.reduce();
}

void Ranks::check(const std::string& where) {
  if (!communicator_) return;
  if (std::optional<std::string> fault = communicator_->error())
    throw Error(ErrorCode::communication, {.where = where,
                                           .what = name_of(*communicator_) + ": " + *fault,
                                           .next = "run the same command again to go on from the last checkpoint"});
}

}  // namespace quern
