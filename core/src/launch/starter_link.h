#pragma once
// What a quern that started ranks and each of its ranks tell each other, over a socket that is the rank's descriptor 3.
// Signals come over it: a terminal's or a scheduler's reach all processes of the group at once, and a second one
// that is sent on would be lost, or taken for another.

#include <functional>
#include <memory>
#include <string>

#include "base/files/descriptor.h"

namespace quern {

inline constexpr int kLinkOfRank = 3;

/// The starter's end.
class RankLink {
 public:
  /// Makes both ends; a resources error where no descriptor is free.
  RankLink();
  /// Of the rank, for dup2() in its process; closed here by `started`.
  int other_end() const { return theirs_.get(); }
  void started() { theirs_.reset(); }

  int descriptor() const { return own_.get(); }
  /// A line with the signal's number.
  void send_signal(int signal) const noexcept;
  /// Reads what came; false when the rank has closed its end.
  bool read();
  /// Whether the rank asks for time to finish something.
  bool needs_time() const { return works_ > 0; }
  /// Whether the rank has begun to train.
  bool trains() const { return trains_; }

 private:
  OwnedDescriptor own_, theirs_;
  int works_ = 0;
  bool trains_ = false;
};

/// Process id of the quern that started this process as a rank; 0: none did.
int starter_of_this_rank();
/// Variable that says so.
inline constexpr const char* kStarterVariable = "QUERN_STARTER";

/// In such a rank, which ignores those signals from its first moment: calls `on_signal` for each that the starter
/// sends, on a thread of its own. Does nothing elsewhere.
void hear_starter(std::function<void(int signal)> on_signal);

/// Tells the starter that this rank begins to train. Does nothing elsewhere.
void tell_starter_of_training();

/// Until all of what this returns is gone, the starter lets this rank finish after another failed. Null elsewhere.
std::shared_ptr<void> time_from_starter();

}  // namespace quern
