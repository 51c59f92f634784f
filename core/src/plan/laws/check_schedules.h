#pragma once
// The rules of schedules, checked before anything runs: every read finds the value it expects, whole, and as often
// written as it expects; a value changed in a slot is put back into its store, or summed over ranks; live values share
// no byte unless the plan says that one is the other, and places are in their memory; and two actions that touch the
// same bytes, one of them writing, are ordered by a stream, an event or the host. What passes has no data race, within
// a run and from run to run.

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "plan/byte_ranges.h"
#include "plan/plan.h"
#include "plan/schedule/lane_clocks.h"

namespace quern {

/// Follows runs one after another over a shadow of all memories, which knows for each byte the value there, who wrote
/// it and who read it since.
class ScheduleChecker {
 public:
  explicit ScheduleChecker(const ScheduleSet& set) : set_(set) {}

  /// The value is there before the first run.
  void hold(const Access& access);
  /// Enqueues a run; its staging places are in slot `slot` of `slot_bytes` each.
  void run(const RunSchedule& schedule, std::int64_t slot = 0, std::int64_t slot_bytes = 0);
  /// The host waits for everything.
  void synchronize() { clocks_.synchronize(); }
  /// The broken rules, in the order in which they were found; at most a few dozen.
  const std::vector<std::string>& faults() const { return faults_; }

 private:
  using Clock = LaneClocks::Clock;
  struct Bytes {
    std::int32_t value = -1;
    std::int32_t version = 0;
    std::int64_t epoch = 0;
    int lane = 0;           // of the last write
    std::int64_t when = 0;  // and its number on that lane
    Clock reads{};          // the last on each lane since
  };
  using Shadow = ByteRanges<Bytes>;

  void act(const RunSchedule& schedule, std::size_t index);
  void check_operands(const RunSchedule& schedule, std::size_t index);
  void use_alone(std::int32_t task);
  void read(const Access& access);
  void write(const Access& access);
  void count_write(const Access& access, bool moves);
  void check_gathered(const Access& access);
  void check_kept(const RunSchedule& schedule);
  void check_end();
  bool is_made_anew(const Place& home) const;
  bool reduces(const Action& action) const;
  bool gathers(const Action& action, const Access& access, const Access& part);
  void count_sum(const Access& whole, std::int32_t version, std::span<const Access> writes);
  Shadow& shadow_of(const Place& place) { return shadows_[{place.space, place.index}]; }
  std::int64_t begin_of(const Place& place) const;
  bool known(int lane, std::int64_t when) const { return now_[static_cast<std::size_t>(lane)] >= when; }
  void fault(const std::string& what);
  std::string name(std::int32_t value) const;

  const ScheduleSet& set_;
  struct Seen {
    int lane = 0;
    std::int64_t when = 0;
  };
  std::map<std::int32_t, Seen> last_launch_;  // of exclusive tasks
  struct Written {
    std::int32_t newest = 0;   // version, in a slot or at its place
    std::int32_t at_home = 0;  // version at its place
  };
  std::map<std::int32_t, ByteRanges<Written>> written_;  // in this run, by value, copies counted as what they are of
  std::map<std::int32_t, std::int64_t> part_writes_;     // in this run, by value of a part of what ranks have
  std::map<std::int32_t, std::int64_t> gathered_;        // by value in a slot: writes of its part before
  std::map<std::pair<Space, std::int32_t>, Shadow> shadows_;
  LaneClocks clocks_;
  std::vector<std::string> faults_;
  std::int64_t epoch_ = 0, staging_ = 0;
  // the action under way
  Clock now_{};
  int lane_ = 0;
  std::string where_;
};

/// Checks all runs of a plan, each after every other that may come before it. Empty: all rules hold.
std::vector<std::string> schedule_faults(const Plan& plan);

/// Checks each run on all ranks together, of which `ranks[i]` is rank i's: collectives meet in one order, alike in
/// kind, size and place, each works on its part of the whole, and no rank waits for what never comes.
std::vector<std::string> rank_faults(std::span<const ScheduleSet* const> ranks);

/// The common part of all ranks' plans, a line each: where tensors are, and the order of collectives.
std::string shared_text(const Plan& plan);

}  // namespace quern
