#pragma once
// All ranks of a run, connected through rank 0: for set-up, agreement and bad news, between hosts. A thread of its own
// hears at once when a rank is gone. It sends heartbeats, which say what keeps a rank busy: a rank that says nothing is
// late after the time-out, one that is busy never is.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "launch/rendezvous/meeting_point.h"

namespace quern {

/// Begins faults about a rank that did not come in time.
inline constexpr const char* kHang = "hang: ";
/// Seconds without a heartbeat after which a rank may be stopped.
inline constexpr double kSilent = 2;
/// "rank 2 has sent nothing for 5.2s, and was reading a checkpoint"
std::string silence_text(int rank, double seconds, const std::string& busy);

class HostGroup {
 public:
  /// Waits until all ranks are here, at most `timeout` seconds, which also holds for each exchange, not counting time
  /// in which a rank is busy. Throws a communication error that names the ranks that did not come; a config error when
  /// the rendezvous address cannot be used.
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
  /// What this rank does that may take any time ("writing step 8"), and does not wait for others; empty: nothing. While
  /// its heartbeat says so, nobody is late. Returns the previous state.
  std::string be_busy(std::string what);
  /// "rank 1 is reading a checkpoint": of a rank that is busy and was heard lately. From any thread.
  std::optional<std::string> busy() const;
  // ---- messages of a rank to rank 0, in order; from any thread, also after a fault ----
  void post(std::string text);
  /// On rank 0, of another rank, the next one; waits for it. Throws a communication error when that rank is gone, and
  /// after a fault when it has sent nothing for kSilent seconds.
  std::string posted(int rank);

  /// Ends the group for all ranks, with this text as the fault, for others with "rank R: "; from any thread.
  void end(const std::string& text) noexcept;
  /// The same where the text names the rank that it is about.
  void end_for(const std::string& text) noexcept;
  /// The first fault: a rank that is gone, that ended the group, or that did not come to an exchange. From any thread.
  std::optional<std::string> fault() const;

  // ---- heartbeats: from any thread, without waiting ----
  struct Note {
    std::string text = {};  ///< what the rank is at
    std::string busy = {};  ///< as in be_busy; of rank 0 on others: as in busy()
    double silent = 0;      ///< seconds since its last heartbeat
  };
  /// What this rank is at, from its next heartbeat on.
  void note(std::string text);
  /// On rank 0 all of them, by rank; elsewhere only rank 0's.
  std::vector<Note> notes() const;

 private:
  class Service;
  int rank_, size_;
  double timeout_;
  int unwinding_;  // exceptions on their way when this was made
  std::unique_ptr<Service> service_;
};

}  // namespace quern
