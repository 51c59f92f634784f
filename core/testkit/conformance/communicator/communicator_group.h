#pragma once
// What the contracts of communicators share: a rank that has joined its group, and memory that its peers know.

#include <algorithm>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "conformance/communicator/launched_ranks.h"
#include "conformance/communicator/rank_processes.h"
#include "conformance/report.h"
#include "conformance/subject.h"
#include "launch/rendezvous/host_group.h"
#include "quern/testkit/device_memory.h"

namespace quern::conformance {

/// Every collective of `subject`, for groups of these sizes.
void check_collectives(Report& report, const Subject& subject, const std::vector<int>& sizes);
/// How groups of these sizes are made, by less than an address and an exchange too, and what they leave behind.
void check_connecting(Report& report, const Subject& subject, const std::vector<int>& sizes);
/// What happens in groups of `ranks` when one is late, stopped, killed, leaves or gives up.
void check_communicator_faults(Report& report, const Subject& subject, int ranks);

/// A rank that is about to join, with its device; to be made in a process of its own.
struct Seat {
  HostGroup hosts;
  std::unique_ptr<Device> device;
  Stream stream;
  Rendezvous rendezvous;

  /// `folder` is one for all ranks of the group.
  Seat(const Subject& subject, const std::string& folder, int rank, int size, double timeout = 60)
      : hosts(rank, size, MeetingPoint::in(folder, "", true), timeout) {
    take_place(folder, rank);
    CheckOptions options = subject.options;
    if (!fresh_device(subject.host, options.device)->traits().host_addressable) options.ordinal += rank;
    device = open_device(subject.host, options);
    stream = device->stream(StreamKind::communication);
    rendezvous = {.rank = rank,
                  .size = size,
                  .address = "file:" + folder + "/rendezvous",
                  .timeout = timeout,
                  .exchange = [this](std::string own) { return hosts.exchange(std::move(own)); }};
  }
  Seat(const Seat&) = delete;
  Seat& operator=(const Seat&) = delete;
};

/// A rank that has joined.
struct Joined : Seat {
  std::unique_ptr<Communicator> communicator;

  Joined(const Subject& subject, const std::string& folder, int rank, int size, double timeout = 60)
      : Seat(subject, folder, rank, size, timeout), communicator(subject.make<Communicator>()) {
    communicator->connect(rendezvous, *device);
  }
};

/// All bytes of the memory are `byte`, as before a call that does nothing.
inline void need_filled(const testkit::DeviceMemory& memory, int byte, const std::string& what) {
  std::vector<std::uint8_t> bytes(memory.bytes());
  memory.read(bytes.data());
  const auto changed = std::find_if(bytes.begin(), bytes.end(), [&](std::uint8_t value) { return value != byte; });
  if (changed != bytes.end())
    broken(what + ", byte " + std::to_string(changed - bytes.begin()), std::to_string(*changed),
           std::to_string(byte) + ", as before: it does nothing");
}

/// Guarded device memory, registered while this lives: made and destroyed by all ranks alike.
class Registered {
 public:
  Registered(Joined& group, std::size_t bytes)
      : memory(*group.device, bytes), communicator_(*group.communicator), unwinding_(std::uncaught_exceptions()) {
    communicator_.register_buffer(memory.data(), memory.bytes());
  }
  ~Registered() noexcept(false) {
    if (std::uncaught_exceptions() == unwinding_) communicator_.unregister_buffer(memory.data());
  }
  Registered(const Registered&) = delete;
  Registered& operator=(const Registered&) = delete;

  testkit::DeviceMemory memory;

 private:
  Communicator& communicator_;
  int unwinding_;
};

}  // namespace quern::conformance
