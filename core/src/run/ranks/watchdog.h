#pragma once
// Watches the ranks of a run from a thread that makes no call of the device. When one of them hangs, or is gone, it
// says which, lets go of those that wait, and ends this process if it does not end by itself.

#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "engine/progress.h"
#include "launch/rendezvous/host_group.h"
#include "quern/communicator.h"

namespace quern {

/// Removes the reports of an earlier run from its directory; only for the holder of the RunLock.
void remove_hang_reports(const std::string& directory) noexcept;

class Watchdog {
 public:
  /// Watches hosts alone until ranks have connected. `directory` is the run's. The group outlives this.
  /// `how_to_continue`: after the fault, for people; "" where another rank says it.
  Watchdog(HostGroup& hosts, std::string directory, std::function<std::string()> how_to_continue);
  /// Waits for a report, for a moment.
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  /// The ranks begin to connect by this, which outlives the watch; until they have, only its traits are read. Once.
  void connecting(Communicator& communicator);
  /// They have; these are the streams to watch. Once.
  void connected(std::shared_ptr<const Progress> progress);
  /// The run knows that it fails, and has a minute to end.
  void leaving();
  /// While what this returns lives, a fault of the group does not end this process.
  std::shared_ptr<void> time_to_finish() const { return held_; }
  /// "; rank 0 has sent nothing for 5.2s", for each rank that this one has not heard of lately; on rank 0 of all.
  std::string silent_ranks() const;
  /// Seconds so far that the compute stream has waited for collectives, by samples.
  double waited() const { return waited_; }

 private:
  void run(const std::stop_token& stop);
  void look();
  void judge(const std::vector<HostGroup::Note>& notes);
  void end(const std::string& fault);
  /// Ends the group, after the report.
  void declare(const std::string& fault);
  void report(const std::string& fault);
  void await_report() const;

  HostGroup& hosts_;
  std::atomic<Communicator*> communicator_ = nullptr;  // null until the ranks begin to connect
  std::shared_ptr<const Progress> kept_;
  std::atomic<const Progress*> progress_ = nullptr;  // null until the ranks have connected
  const std::string directory_;
  const std::function<std::string()> how_to_continue_;
  std::atomic<bool> leaving_ = false;
  std::atomic<double> waited_ = 0;
  const std::shared_ptr<void> held_ = std::make_shared<int>();
  std::once_flag reported_;
  std::shared_future<void> report_;  // written by a thread that may hang, as a file server does
  std::mutex mutex_;
  // ---- under the mutex ----
  std::string seen_;  // of the streams, while they seemed to hang

  // ---- of the thread ----
  Progress::Number number_ = 0;
  bool busy_ = false;            // some rank is
  double connecting_ = 0;        // seconds that this process ran while the ranks connected, and none was busy
  double stuck_ = 0;             // seconds that this process ran while the stream was in that collective, and so too
  std::optional<double> ended_;  // since when there is a fault, by now()
  std::atomic<bool> aborted_ = false;
  std::jthread aborting_;  // an abort may hang as well
  std::jthread thread_;    // last: ends before what it uses
};

}  // namespace quern
