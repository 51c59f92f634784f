#pragma once
// All ranks of a run, connected through rank 0: for set-up, agreement and bad news, between hosts. A thread of its own
// hears at once when a rank is gone.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "launch/rendezvous/meeting_point.h"

namespace quern {

/// Begins faults about a rank that did not come in time.
inline constexpr const char* kHang = "hang: ";

class HostGroup {
 public:
  /// Waits until all ranks are here, at most `timeout` seconds, which also holds for each exchange. Throws a
  /// communication error that names the ranks that did not come; a config error when the meeting point cannot be used.
  HostGroup(int rank, int size, const MeetingPoint& point, double timeout);
  /// Leaves in good order, or with a fault for the others when an exception ends the run.
  ~HostGroup();
  HostGroup(const HostGroup&) = delete;
  HostGroup& operator=(const HostGroup&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  double timeout() const { return timeout_; }

  /// What each rank gave, by rank; collective, by one thread at a time, up to 64 MiB each. Throws a communication error
  /// when the group has a fault, or gets one while this waits.
  std::vector<std::string> exchange(std::string own);
  /// The next exchange may take this rank so many seconds to come to, or to wait for others: called by all ranks before
  /// what one of them does alone and others wait for.
  void be_patient(double seconds);
  /// Ends the group for all ranks, with this text as the fault, for others with "rank R: "; from any thread.
  void end(const std::string& text) noexcept;
  /// The same where the text names the rank that it is about.
  void end_for(const std::string& text) noexcept;
  /// The first fault: a rank that is gone, that ended the group, or that did not come to an exchange. From any thread.
  std::optional<std::string> fault() const;

  // ---- what ranks are at, for messages: from any thread, without waiting ----
  struct Note {
    std::string text = {};
    std::uint64_t count = 0;  ///< of notes from that rank so far: one that says nothing more may be stopped
  };
  /// Takes the place of this rank's last note; dropped where earlier ones have not gone out yet. Rank 0 answers.
  void note(const std::string& text);
  /// On rank 0 the last notes, by rank; elsewhere only rank 0's, which counts its answers.
  std::vector<Note> notes() const;

 private:
  class Service;
  int rank_, size_;
  double timeout_;
  int unwinding_;  // exceptions on their way when this was made
  std::unique_ptr<Service> service_;
};

}  // namespace quern
