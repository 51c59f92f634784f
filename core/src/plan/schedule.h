#pragma once
// A step as data: schedules are lists of actions on streams, and what an action touches are ranges of memories.
// schedule/ makes them, laws/ proves them free of races, time/ simulates them, the engine binds and runs them.

#include <compare>
#include <cstdint>
#include <deque>
#include <map>
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
inline bool overlap(const Place& a, const Place& b) {
  return a.space == b.space && a.index == b.index && a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes;
}

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

/// The ranks that a collective is among. A rank is in one group of each axis, which has a communicator.
enum class Axis : std::uint8_t {
  ranks,    ///< all: sums go over machines, and what the ranks of a machine shard is gathered there
  machine,  ///< the ranks of this machine alone
};
inline constexpr std::size_t kAxes = 2;
std::string_view name_of(Axis axis);

/// What launches of equal work share, over layers and schedules.
struct Task {
  OpInstance instance = {};
  std::string name = {};     ///< kind and first result, "matmul qkv": what profilers and reports call it
  std::string program = {};  ///< "block.forward"
  Phase phase = Phase::forward;
  Axis axis = Axis::ranks;  ///< of a collective
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

/// A micro-step among its step's.
struct MicroStep {
  bool first = true, last = true;
  bool observed = false;
  bool updates = false;  ///< what the last update deferred, in a first one
  auto operator<=>(const MicroStep&) const = default;
};

/// What an engine can be asked to run. A step is `upload` and a micro-step for each micro-batch, by its place in the
/// step (ScheduleSet::run_of); `update`; `result`. Where stores have state, `update` only prepares it: each tensor is
/// updated just before the forward pass of the next step that reads it, or by `apply`.
struct Run {
  enum class Kind : std::uint8_t {
    refresh,  ///< working copies from masters that were written
    upload,   ///< a micro-batch and the step's state
    evaluate,
    logits,
    next_logits,
    micro_step,
    update,
    apply,  ///< what the update deferred to the next step's first micro-step, and the gathers of working copies
    result,
    exchange,         ///< masters change places with what evaluations use instead; refresh follows
    observe_weights,  ///< before the update of a step that observes what its scales lose
    load,             ///< the forms of frozen weights that are not kept as they are given, one tensor after the other
  };
  Kind kind = Kind::micro_step;
  MicroStep step = {.first = false, .last = false};  ///< of a micro-step
  auto operator<=>(const Run&) const = default;

  static const Run refresh, upload, evaluate, logits, next_logits, update, apply, result, exchange, observe_weights,
      load;
  static const Run first, later, last, only;  ///< micro-steps that neither observe nor update
  static const Run observed_first, updating_first;
};
inline constexpr Run Run::refresh{Kind::refresh}, Run::upload{Kind::upload}, Run::evaluate{Kind::evaluate},
    Run::logits{Kind::logits}, Run::next_logits{Kind::next_logits}, Run::update{Kind::update}, Run::apply{Kind::apply},
    Run::result{Kind::result}, Run::exchange{Kind::exchange}, Run::observe_weights{Kind::observe_weights},
    Run::load{Kind::load};
inline constexpr Run Run::first{.step = {.last = false}}, Run::later{}, Run::last{.step = {.first = false}},
    Run::only{.step = {}}, Run::observed_first{.step = {.last = false, .observed = true}},
    Run::updating_first{.step = {.last = false, .updates = true}};
/// "first micro-step, observed"
std::string name_of(const Run& run);
/// Every run that a plan can have, in an order to make and print them in.
std::vector<Run> all_runs();

struct RunSchedule {
  Run run = {};
  std::string name = {};  ///< of the run
  std::vector<Action> actions = {};
  std::vector<Access> operands = {};
  std::int32_t events = 0;
  bool starts_sums = false;  ///< the first sum over ranks of a gradient is written, others are added to it

  std::span<const Access> reads(const Action& action) const { return {operands.data() + action.first, action.reads}; }
  std::span<const Access> writes(const Action& action) const {
    return {operands.data() + action.first + action.reads, action.writes};
  }
  /// All of them: what it reads, then what it writes.
  std::span<const Access> operands_of(const Action& action) const {
    return {operands.data() + action.first, action.reads + action.writes};
  }
  /// Appends the action with these operands.
  void add(Action action, std::span<const Access> reads, std::span<const Access> writes);
  bool empty() const { return actions.empty(); }
  /// One of the same run, without actions.
  RunSchedule anew() const { return {.run = run, .name = name, .events = events, .starts_sums = starts_sums}; }
};

/// Bytes/s of a store itself, behind the device's link to the host; 0: no less than the link.
struct StoreRates {
  double put = 0, get = 0;
};

/// The schedules that a plan's options ask for; any other is empty.
struct ScheduleSet {
  std::vector<Task> tasks;
  std::vector<std::string> values;  ///< names, for people
  std::vector<bool> lasting;        ///< by value: outlives the run that wrote it
  /// By value, as far as it goes: what of a store it is in a slot; absent: nothing.
  std::vector<Access> copy_of = {};
  std::vector<bool> in_place = {};     ///< by store, as far as it goes: launches read and write there, without slots
  std::vector<StoreRates> rates = {};  ///< by store, as far as it goes
  std::map<std::int64_t, OverRanks> over_ranks = {};  ///< by where wholes begin in Space::ranks
  std::vector<Access> held;  ///< what is there before the first run: masters, states, zeroed or written
  std::deque<RunSchedule> runs;

  /// Of a launch or collective.
  const Task& task_of(const Action& action) const { return tasks[static_cast<std::size_t>(action.task)]; }
  /// Without the last one's and the updates' variant where there is none.
  Run run_of(MicroStep step) const;
  const RunSchedule& operator[](const Run& run) const;
  /// Adds it, without actions, where it is missing.
  RunSchedule& operator[](const Run& run);
  /// Whether launches have it in a slot: it is over ranks, or in a store, and not in place there.
  bool has_slot(const Place& place) const;
  /// The access itself, or to what it is a copy of, where that is at home.
  Access at_home(const Access& access) const;
};

/// By store and offset of their ends: bytes that values which end there have more on another rank.
using SpareBytes = std::map<std::pair<std::int32_t, std::int64_t>, std::int64_t>;

/// Memory of the arena in which windows have their slots, one behind the other and from the beginning again.
struct SlotRing {
  std::int64_t offset = 0;  ///< in the arena
  std::int64_t bytes = 0;   ///< at least the largest window's
  SpareBytes spare = {};    ///< with which slots are at the same places on all ranks
  std::int64_t kept = 0;    ///< behind them: for values that stay from the first window that reads them to the last
};

/// Sets Access::version of all operands, as the actions' order has it.
void number_versions(const ScheduleSet& set, RunSchedule& schedule);

}  // namespace quern
