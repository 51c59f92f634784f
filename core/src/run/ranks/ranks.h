#pragma once
// This process among the ranks of a run: how they meet, what they agree on, and what rank 0 does for all. Alone, where
// the run has one rank, everything here does nothing.

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "launch/rendezvous/host_group.h"
#include "launch/rendezvous/rank_rendezvous.h"
#include "run/session.h"

namespace quern {

class Watchdog;

class Ranks {
 public:
  /// Waits until all ranks that the session's config asks for are here. Throws a config error where nothing started
  /// them, or started another number.
  explicit Ranks(const Session& session);
  /// Lets the other ranks go when an exception ends the run.
  ~Ranks();
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  int rank() const { return place_.rank; }
  int size() const { return place_.size; }
  /// Ranks of a machine share state, and each machine has all of it; this rank's place in its machine.
  int shards() const { return place_.size / machines_; }
  int shard() const { return place_.rank % shards(); }
  /// Whether this is rank 0, which alone writes to the run directory and to the console.
  bool leads() const { return place_.rank == 0; }

  // ---- collective, between hosts ----
  /// What each rank gave, by rank.
  std::vector<std::string> exchange(std::string own) { return hosts_ ? hosts_->exchange(std::move(own)) : alone(own); }
  /// The bits that are set on some rank.
  std::uint32_t any(std::uint32_t own);
  /// What keeps this rank from coming to the others: "reading a checkpoint"; empty: nothing does. They wait for it as
  /// long as its heartbeat says so, and so do those that this rank waits for.
  void be_busy(std::string what);
  /// `work`, which does not wait for other ranks, busy with `what`.
  void busy(const std::string& what, const std::function<void()>& work);
  /// Waits until all ranks are here, none of them busy: before work that they do together.
  void together();
  /// What `make` gives on rank 0, where alone it is called, busy with `what`.
  std::string from_leader(const std::string& what, const std::function<std::string()>& make);
  /// A message to rank 0, and there the next one of another rank, as HostGroup has them; from any thread.
  void post(const std::string& text) { hosts_->post(text); }
  std::string posted(int rank) { return hosts_->posted(rank); }
  /// Throws a config error, on all ranks, that names a rank whose `own` is not rank 0's, and the first line where they
  /// differ; `what` says what that is.
  void need_same(const std::string& what, const std::string& own);
  /// `work`, on rank 0 alone, busy with `what`, which may read tensors that are split over ranks; what it throws is
  /// thrown on all ranks.
  void lead(const std::string& what, Engine& engine, const std::function<void()>& work);

  // ---- on devices ----
  /// Opens this rank's unit: `first` and those behind it are the ranks' of this machine, or the only one that is
  /// visible is its own; collective. Throws a config error, on all ranks, that names two which would share one.
  void open(Device& device, std::int64_t first);
  /// Connects the communicator; collective. It and `device` outlive this. Throws a communication error when it made
  /// another group than it was asked for.
  void connect(Communicator& communicator, Device& device);
  /// The same, and makes the engine's memory known to the other ranks. `engine` outlives this.
  void join(Communicator& communicator, Device& device, Engine& engine);
  /// Ends that when a run has ended well; collective, so that no rank is gone before the others are done.
  void leave(Engine& engine);
  /// While what this returns lives, this process is not ended because another rank failed. From any thread.
  std::shared_ptr<void> time_to_finish();
  /// Lets the other ranks know why this one leaves, which it has to do within a minute from now.
  void fail(const std::string& text) noexcept;
  /// What `work` returns; the other ranks learn what it throws.
  template <class Work>
  auto telling(const Work& work) try {
    return work();
  } catch (const std::exception& error) {
    fail(error.what());
    throw;
  }
  /// Of several ranks that lose each other: whether this one tells people how the run goes on. A quern that started
  /// them does; else it is rank 0, or rank 1 where that is gone.
  bool says_how_to_continue() const;
  /// Throws a communication error when a collective has failed; `where` says when: "step 12".
  void check(const std::string& where);
  /// Seconds so far that this rank's compute stream has waited for collectives.
  double waited() const;

 private:
  static std::vector<std::string> alone(std::string& own);
  /// Busy with `what` until it goes; null where the run has one rank.
  std::shared_ptr<void> busy_scope(std::string what);
  void follow(Engine& engine);

  RankPlace place_;
  int machines_;
  std::string directory_;  // of the run
  std::unique_ptr<HostGroup> hosts_;
  std::unique_ptr<RankRendezvous> rendezvous_;
  Communicator* communicator_ = nullptr;
  int unwinding_;  // exceptions on their way when this was made
  std::unique_ptr<Watchdog> watchdog_;
};

}  // namespace quern
