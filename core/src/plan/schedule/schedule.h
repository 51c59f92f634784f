#pragma once
// A step as data: schedules are lists of actions on streams, and what an action touches are ranges of memories. The
// planner builds them (make_schedules.h), check_schedules.h proves them free of races, the engine binds and runs them.

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "quern/op_spec.h"

namespace quern {

/// A kind of memory that an action can touch.
enum class Space : std::uint8_t {
  device,   ///< the arena
  staging,  ///< pinned: one slot for each micro-batch that may be under way, used alternately; offsets are in a slot
  results,  ///< pinned: what the host reads at the end of a step
  store,    ///< a slot of an offload store; `index` says which
  ranks,    ///< no memory: of what is there each rank has a part elsewhere, and launches have the whole in a slot
};
std::string_view name_of(Space space);

/// A range of bytes. Absent: offset -1.
struct Place {
  Space space = Space::device;
  std::int32_t index = 0;
  std::int64_t offset = -1;
  std::int64_t bytes = 0;
  bool present() const { return offset >= 0; }
  bool operator==(const Place&) const = default;
};

/// A place, and which value an action expects or leaves there: an index into ScheduleSet::values. Two values are the
/// same one only where the plan says so (a tensor that is updated, a stream that is handed on as it came).
struct Access {
  Place place = {};
  std::int32_t value = -1;
  std::int32_t version = 0;  ///< writes of these bytes in their run, up to the read, or with the write
  bool operator==(const Access&) const = default;
};

/// The streams of a schedule. The host is one too: what it does to pinned memory is ordered like any other action.
enum class Lane : std::uint8_t { compute, copy_in, copy_out, communication, host };
inline constexpr int kLanes = 5;
std::string_view name_of(Lane lane);

enum class ActionKind : std::uint8_t { launch, copy, fill, collective, put, get, record, wait, host };
std::string_view name_of(ActionKind kind);

/// One action. Its operands are a range of RunSchedule::operands: what it reads, then what it writes. A launch has all
/// of its op's operands there, absent ones too, and its workspace last.
struct Action {
  ActionKind kind = ActionKind::launch;
  Lane lane = Lane::compute;
  std::int32_t task = -1;   ///< launch: index into ScheduleSet::tasks
  std::int32_t event = -1;  ///< record, wait: number of the event within the schedule
  std::uint8_t byte = 0;    ///< fill: what each byte becomes
  std::uint32_t first = 0;  ///< operand
  std::uint32_t reads = 0, writes = 0;
  std::int32_t layer = -1;   ///< for people; -1 outside the layers
  std::int32_t window = -1;  ///< launches that take what they use of stores together; see residency.h
};

struct RunSchedule {
  std::string name = {};  ///< "first micro-step"
  std::vector<Action> actions = {};
  std::vector<Access> operands = {};
  std::int32_t events = 0;
  bool starts_sums = false;  ///< the first sum over ranks of a gradient is written, others are added to it

  std::span<const Access> reads(const Action& action) const { return {operands.data() + action.first, action.reads}; }
  std::span<const Access> writes(const Action& action) const {
    return {operands.data() + action.first + action.reads, action.writes};
  }
  /// Appends the action with these operands.
  void add(Action action, std::span<const Access> reads, std::span<const Access> writes);
  bool empty() const { return actions.empty(); }
};

/// What launches of equal work share, over layers and schedules.
struct Task {
  OpInstance instance = {};
  std::string name = {};     ///< kind and first result, "matmul qkv": what profilers and reports call it
  std::string program = {};  ///< "block.forward"
  Phase phase = Phase::forward;
  Cost cost = {};
  double seconds = 0;                                ///< about what a launch takes
  std::string slow = {};                             ///< why it takes so long; empty: it does not
  double fast_seconds = 0;                           ///< with `slow`: what it would take otherwise
  std::vector<std::int32_t> changed = {};            ///< inputs that it also writes
  std::vector<std::int32_t> summed = {};             ///< outputs that it adds to, and so also reads
  std::vector<std::pair<int, int>> overwrites = {};  ///< output `first` may take over the memory of input `second`
  bool exclusive = false;                            ///< its kernel keeps scratch: never on two streams at once
};

/// A value in Space::ranks.
struct OverRanks {
  Access part = {};          ///< this rank's; absent: each window that uses the whole makes it
  std::int64_t first = 0;    ///< byte of the whole where the part begins
  std::int64_t largest = 0;  ///< bytes of the largest part of any rank
  std::int32_t gather = -1;  ///< tasks: makes the whole of all parts,
  std::int32_t reduce = -1;  ///< the part of the sum over all ranks' wholes,
  std::int32_t add = -1;     ///< and adds such a part to another one
};

/// What an engine can be asked to run. A step is `upload` and a micro-step for each micro-batch, by its place in the
/// step (ScheduleSet::run_of); `update`; `result`. Where stores have state, `update` only prepares it: each tensor is
/// updated just before the forward pass of the next step that reads it, or by `apply`.
enum class Run : std::uint8_t {
  refresh,  ///< working copies from masters that were written
  upload,   ///< a micro-batch and the step's state
  evaluate,
  logits,
  next_logits,
  first,
  later,
  last,  ///< last and only: empty where they would be as later and first
  only,
  update,
  apply,  ///< what the update deferred to the next step's first micro-step, and the gathers of working copies
  result,
  observed_first,  ///< micro-steps of a step that observes what its scales lose
  observed_later,
  observed_last,
  observed_only,
  observe_weights,  ///< before the update of such a step
  updating_first,   ///< first micro-steps that apply the last step's deferred update
  updating_only,
  observed_updating_first,
  observed_updating_only,
  load,  ///< the forms of frozen weights that are not kept as they are given, one tensor after the other
};
inline constexpr int kRuns = 22;
std::string_view name_of(Run run);

/// A micro-step among its step's.
struct MicroStep {
  bool first = true, last = true;
  bool observed = false;
  bool updates = false;  ///< what the last update deferred, in a first one
  bool operator==(const MicroStep&) const = default;
};
/// Absent: the run is none.
std::optional<MicroStep> micro_step_of(Run run);

/// All schedules of a plan; those that its options do not ask for are empty.
struct ScheduleSet {
  std::vector<Task> tasks;
  std::vector<std::string> values;  ///< names, for people
  std::vector<bool> lasting;        ///< by value: outlives the run that wrote it
  /// By value, as far as it goes: what of a store it is in a slot; absent: nothing.
  std::vector<Access> copy_of = {};
  std::vector<bool> in_place = {};  ///< by store, as far as it goes: launches read and write there, without slots
  std::map<std::int64_t, OverRanks> over_ranks = {};  ///< by where wholes begin in Space::ranks
  std::vector<Access> held;  ///< what is there before the first run: masters, states, zeroed or written
  RunSchedule runs[kRuns];

  Run run_of(const MicroStep& micro_step) const;
  const RunSchedule& operator[](Run run) const { return runs[static_cast<std::size_t>(run)]; }
  RunSchedule& operator[](Run run) { return runs[static_cast<std::size_t>(run)]; }
  /// Whether launches have it in a slot: it is over ranks, or in a store, and not in place there.
  bool has_slot(const Place& place) const;
  /// The access itself, or to what it is a copy of, where that is at home.
  Access at_home(const Access& access) const;
};

/// Sets Access::version of all operands, as the actions' order has it.
void number_versions(const ScheduleSet& set, RunSchedule& schedule);

}  // namespace quern
