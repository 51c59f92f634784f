// The checks over all ranks together: a run of each is played at once, every lane in its own order, and a
// collective only when it is next on a lane of all of them.
#include <numeric>

#include "plan/laws/check_schedules.h"

namespace quern {

namespace {

/// A rank's run: lanes as queues of actions, and the events recorded so far. Actions of the host, which enqueues the
/// others, come in their order too.
struct RankRun {
  const ScheduleSet* set = nullptr;
  const RunSchedule* schedule = nullptr;
  std::array<std::vector<std::size_t>, kLanes> lanes;
  std::array<std::size_t, kLanes> next{};
  std::vector<bool> recorded;

  const Action* at(int lane) const {
    const auto index = static_cast<std::size_t>(lane);
    return next[index] < lanes[index].size() ? &schedule->actions[lanes[index][next[index]]] : nullptr;
  }

  /// Runs what needs no other rank. Whether anything ran.
  bool advance() {
    bool ran = false;
    for (int lane = 0; lane < kLanes; ++lane)
      for (const Action* action = at(lane); action != nullptr; action = at(lane)) {
        if (action->kind == ActionKind::collective) break;
        const auto event = static_cast<std::size_t>(action->event);
        if (action->kind == ActionKind::wait && !recorded[event]) break;
        if (action->kind == ActionKind::record) recorded[event] = true;
        ++next[static_cast<std::size_t>(lane)];
        ran = true;
      }
    return ran;
  }
  bool done() const {
    for (int lane = 0; lane < kLanes; ++lane)
      if (at(lane)) return false;
    return true;
  }
};

/// The whole goes into a collective or comes out of it; all ranks have it alike.
bool whole_goes_in(const OpInstance& op) {
  const auto bytes = [](const std::vector<Operand>& operands) { return operands.empty() ? 0 : operands[0].bytes(); };
  return bytes(op.inputs) > bytes(op.outputs) || op.kind == "all_to_all";
}

/// What a rank does in a collective, and where.
std::string described(const RankRun& rank, const Action* action) {
  if (!action) return "nothing";
  const OpInstance& op = rank.set->task_of(*action).instance;
  std::string text = op.kind;
  if (rank.set->task_of(*action).axis != Axis::ranks)
    text += " of a " + std::string(name_of(rank.set->task_of(*action).axis));
  const bool in = whole_goes_in(op);
  const auto accesses = in ? rank.schedule->reads(*action) : rank.schedule->writes(*action);
  const std::vector<Operand>& operands = in ? op.inputs : op.outputs;
  for (std::size_t i = 0; i < operands.size(); ++i)
    text += " " + std::string(name_of(operands[i].dtype)) + " " + to_string(operands[i].extents) +
            (i < accesses.size() ? " at " + std::to_string(accesses[i].place.offset) : "");
  if (op.kind == "all_to_all") text += " to " + std::to_string(rank.schedule->writes(*action)[0].place.offset);
  return text;
}

/// Other ranks touch this one's memory only where its own action says so: in the arena, and what it gives or takes for
/// itself is its part of the whole, or is apart from that.
std::string place_fault(const RankRun& rank, std::size_t number, const Action& action) {
  const auto reads = rank.schedule->reads(action), writes = rank.schedule->writes(action);
  for (const Access& access : rank.schedule->operands_of(action))
    if (access.place.space != Space::device)
      return "works in " + std::string(name_of(access.place.space)) + ", which other ranks cannot reach";
  const OpInstance& op = rank.set->task_of(action).instance;
  if (!op.attributes.has("counts") || op.kind == "all_to_all" || reads.empty() || writes.empty()) return "";
  const bool in = whole_goes_in(op);
  const Place &whole = (in ? reads : writes)[0].place, &part = (in ? writes : reads)[0].place;
  const std::vector<double>& counts = op.attributes.list("counts");
  const double first = std::accumulate(counts.begin(), counts.begin() + static_cast<std::ptrdiff_t>(number), 0.0);
  const std::int64_t wanted = whole.offset + byte_count({static_cast<std::int64_t>(first)}, op.inputs[0].dtype);
  const bool apart = part.offset + part.bytes <= whole.offset || part.offset >= whole.offset + whole.bytes;
  return apart || part.offset == wanted ? ""
                                        : "has its part at " + std::to_string(part.offset) +
                                              ", and in the whole it is at " + std::to_string(wanted);
}

std::vector<std::string> rank_faults(std::span<const ScheduleSet* const> ranks, const Run& run) {
  std::vector<RankRun> runs;
  for (const ScheduleSet* set : ranks) {
    RankRun rank{.set = set, .schedule = &(*set)[run], .lanes = {}, .next = {}, .recorded = {}};
    rank.recorded.assign(static_cast<std::size_t>(rank.schedule->events), false);
    for (std::size_t i = 0; i < rank.schedule->actions.size(); ++i)
      rank.lanes[static_cast<std::size_t>(rank.schedule->actions[i].lane)].push_back(i);
    runs.push_back(std::move(rank));
  }
  std::vector<std::string> faults;
  auto fault = [&](std::size_t rank, const std::string& what) {
    faults.push_back(runs[rank].schedule->name + ", rank " + std::to_string(rank) + ": " + what);
  };
  while (true) {
    for (RankRun& rank : runs)
      while (rank.advance()) {
      }
    bool met = false;
    for (int lane = 0; lane < kLanes; ++lane) {
      // The first rank that has a collective here says what all others must have.
      const Action* wanted = runs[0].at(lane);
      if (!wanted || wanted->kind != ActionKind::collective) continue;
      bool all = true;
      for (std::size_t r = 1; r < runs.size(); ++r) {
        const Action* action = runs[r].at(lane);
        if (!action || action->kind != ActionKind::collective) {
          all = false;
          continue;
        }
        if (described(runs[r], action) != described(runs[0], wanted)) {
          fault(r, "makes " + described(runs[r], action) + " where rank 0 makes " + described(runs[0], wanted));
          return faults;
        }
      }
      if (!all) continue;
      for (std::size_t r = 0; r < runs.size(); ++r) {
        const Action& action = *runs[r].at(lane);
        if (const std::string what = place_fault(runs[r], r, action); !what.empty())
          fault(r, described(runs[r], &action) + " " + what);
        ++runs[r].next[static_cast<std::size_t>(lane)];
      }
      met = true;
    }
    if (!met) break;
  }
  for (std::size_t r = 0; r < runs.size(); ++r)
    for (int lane = 0; lane < kLanes; ++lane)
      if (const Action* action = runs[r].at(lane))
        fault(r, std::string(name_of(static_cast<Lane>(lane))) + " never gets past " +
                     (action->kind == ActionKind::collective
                          ? described(runs[r], action)
                          : std::string(name_of(action->kind)) + " of event " + std::to_string(action->event)));
  return faults;
}

}  // namespace

std::vector<std::string> rank_faults(std::span<const ScheduleSet* const> ranks) {
  std::vector<std::string> faults;
  for (const Run& run : all_runs()) {
    const std::vector<std::string> own = rank_faults(ranks, run);
    faults.insert(faults.end(), own.begin(), own.end());
  }
  return faults;
}

std::string shared_text(const Plan& plan) {
  std::string text = "device memory " + std::to_string(plan.device_bytes) + "\n";
  for (const PlannedTensor& tensor : plan.tensors)
    if (tensor.part_of < 0)
      text += tensor.kind + " " + tensor.parameter + " " + std::to_string(tensor.layer) + ", " +
              std::string(name_of(tensor.dtype)) + " " + to_string(tensor.whole_extents()) + " at " +
              std::to_string(tensor.offset) + "\n";
  for (const RunSchedule& schedule : plan.schedules.runs) {
    const RankRun run{.set = &plan.schedules, .schedule = &schedule, .lanes = {}, .next = {}, .recorded = {}};
    for (const Action& action : schedule.actions)
      if (action.kind == ActionKind::collective) text += schedule.name + ": " + described(run, &action) + "\n";
  }
  return text;
}

}  // namespace quern
