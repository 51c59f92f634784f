#pragma once
// Where rank 0 waits for the others: in a file of a directory that the ranks share, or at a host and port that the user
// names.

#include <optional>
#include <string>
#include <vector>

#include "launch/rank_place.h"
#include "launch/rendezvous/frame_socket.h"
#include "launch/rendezvous/secret.h"

namespace quern {

/// How to reach rank 0, and to know it.
struct RankZero {
  std::vector<std::string> hosts;
  int port = 0;
  Secret secret{};
};

class MeetingPoint {
 public:
  /// A file in `directory`, of the launch `name`; `local`: all ranks are on this machine.
  static MeetingPoint in(const std::string& directory, const std::string& name, bool local);
  /// QUERN_RENDEZVOUS and QUERN_SECRET where they are set, else a file in `directory`. MASTER_ADDR is the first host
  /// that torchrun's ranks try. Throws a config error when one is missing or malformed.
  static MeetingPoint of(const RankPlace& place, const std::string& directory, const Environment& environment);

  /// Rank 0: listens, and lets the others know. Throws a config error when the user's port is in use, a resources error
  /// when no file can be written.
  Listener open(Secret& secret) const;
  /// Rank 0, when all are here.
  void close() const noexcept;
  /// Removes the files of launches that were killed; only for the holder of the RunLock, whose own ranks have met.
  static void remove_left(const std::string& directory) noexcept;
  /// Others: the present knowledge of rank 0. The file of a dead run may be there; nobody answers as it says then.
  std::optional<RankZero> look() const;
  /// Whether what look() returns is final.
  bool fixed() const { return fixed_.has_value(); }
  const std::string& launch() const { return launch_; }
  /// For messages: "QUERN_RENDEZVOUS" or the file's path.
  std::string text() const { return fixed() ? "QUERN_RENDEZVOUS" : file_; }

 private:
  std::optional<RankZero> fixed_;
  std::string launch_, directory_, file_, first_host_;
  bool local_ = false;
};

}  // namespace quern
