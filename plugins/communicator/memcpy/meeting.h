#pragma once
// How the ranks of one machine find each other and hand each other descriptors: over a Unix socket in a folder that
// only their user can enter, all through rank 0. Only set-up and barriers come here; what happens on streams is on the
// board.

#include <string>
#include <vector>

#include "descriptor.h"
#include "quern/communicator.h"

namespace quern::memcpy {

struct Message {
  std::string bytes = {};      // up to kMostBytes
  Descriptor descriptor = {};  // none, or one
};

class Meeting {
 public:
  static constexpr std::size_t kMostBytes = 4096;

  /// Waits until all ranks are here; rank 0 makes the socket and removes its name again. Throws a config error for an
  /// address that cannot be used, else a communication error that names the ranks that are missing.
  explicit Meeting(const Rendezvous& rendezvous);

  /// What each rank gave, by rank. Throws a communication error on all ranks that still wait, which names a rank.
  std::vector<Message> exchange(Message own);
  /// Ends an exchange that waits in another thread, here and on peers, and all later ones.
  void end() noexcept;

 private:
  void listen(int folder, const std::string& name);
  void call(int folder, const std::string& name);
  std::vector<Message> gather(Message own);
  void tell(const std::string& fault) noexcept;

  const Rendezvous rendezvous_;
  std::vector<Descriptor> peers_;  // rank 0: by rank, none for itself; others: rank 0's alone
};

}  // namespace quern::memcpy
