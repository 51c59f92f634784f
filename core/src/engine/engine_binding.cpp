// How an engine gets from a plan to calls: kernels, addresses of operands, and which actions become graphs.

#include <algorithm>
#include <utility>

#include "engine/engine.h"
#include "engine/progress.h"
#include "quern/checked.h"
#include "quern/error.h"

namespace quern {

namespace {

/// Views that are side by side, with nothing but the gaps of alignment between them, as one.
std::vector<View> joined(const std::vector<View>& views, std::size_t alignment) {
  std::vector<View> runs;
  for (const View& view : views) {
    if (!runs.empty() && runs.back().dtype == view.dtype) {
      View& run = runs.back();
      const auto distance = static_cast<std::byte*>(view.data) - static_cast<std::byte*>(run.data);
      const auto end = rounded_up(static_cast<std::int64_t>(run.bytes()), static_cast<std::int64_t>(alignment));
      if (distance == end) {
        run.extents = {(distance + static_cast<std::int64_t>(view.bytes())) /
                       static_cast<std::int64_t>(size_of(view.dtype))};
        continue;
      }
    }
    runs.push_back(view);
  }
  return runs;
}

/// Whether the action may be part of a graph of some of a run's actions.
bool is_segment_part(const Action& action) {
  return action.lane == Lane::compute && (action.kind == ActionKind::launch || action.kind == ActionKind::collective);
}

}  // namespace

void Engine::prepare_kernels() {
  kernel_of_task_.assign(plan_.schedules.tasks.size(), nullptr);
  for (const RunSchedule& schedule : plan_.schedules.runs)
    for (const Action& action : schedule.actions) {
      if (action.kind != ActionKind::launch) continue;
      const auto task = static_cast<std::size_t>(action.task);
      if (!kernel_of_task_[task]) kernel_of_task_[task] = kernel_for(plan_.schedules.tasks[task].instance);
    }
}

const Kernel* Engine::kernel_for(const OpInstance& instance) {
  auto& known = kernels_[instance.kind];
  for (const auto& [seen, kernel] : known)
    if (seen == instance) return kernel.get();
  known.emplace_back(instance, device_.prepare(instance));
  return known.back().second.get();
}

// Staging memory has no address of its own: its slots alternate.
std::byte* Engine::address(const Place& place) const {
  if (!place.present()) return nullptr;
  switch (place.space) {
    case Space::device: return arena_ + place.offset;
    case Space::staging: return slot_ + place.offset;
    case Space::results: return staging_ + plan_.staging_slot_bytes * plan_.options.uploads + place.offset;
    case Space::store:
      if (std::byte* memory = store_memory_[static_cast<std::size_t>(place.index)]) return memory + place.offset;
      break;
    case Space::ranks: break;
  }
  fail_internal("engine", "no memory of kind " + std::string(name_of(place.space)));
}

View Engine::view_of(const Access& access, const Operand& operand) const {
  return {address(access.place), operand.dtype, operand.extents};
}

void Engine::bind(const RunSchedule& schedule) {
  BoundRun& bound = bound_[&schedule];
  for (const Action& action : schedule.actions) {
    Bound made;
    if (action.task >= 0) {
      const OpInstance& instance = plan_.schedules.task_of(action).instance;
      for (std::size_t i = 0; i < instance.inputs.size(); ++i)
        made.inputs.push_back(view_of(schedule.reads(action)[i], instance.inputs[i]));
      for (std::size_t o = 0; o < instance.outputs.size(); ++o)
        made.outputs.push_back(view_of(schedule.writes(action)[o], instance.outputs[o]));
    }
    if (action.kind == ActionKind::collective) bind_collective(action, made);
    if (action.kind == ActionKind::launch) {
      made.kernel = kernel_of_task_[static_cast<std::size_t>(action.task)];
      made.workspace = address(schedule.writes(action).back().place);
    }
    bound.actions.push_back(std::move(made));
  }
  for (int event = 0; event < schedule.events; ++event) bound.events.push_back(device_.make_event());
  mark_collectives(schedule, bound);
  make_segments(schedule, bound);
}

void Engine::mark_collectives(const RunSchedule& schedule, BoundRun& bound) {
  std::vector<bool> behind(static_cast<std::size_t>(schedule.events), false);  // events: collectives come before them
  Bound* last[kLanes] = {};  // a collective that no other action of its lane has followed yet
  std::size_t collectives = 0;
  for (std::size_t i = 0; i < schedule.actions.size(); ++i) {
    const Action& action = schedule.actions[i];
    Bound*& before = last[static_cast<std::size_t>(action.lane)];
    if (before) before->closes = action.kind != ActionKind::collective;
    before = nullptr;
    if (action.kind == ActionKind::collective) {
      before = &bound.actions[i];
      before->number = collectives++;
      before->closes = true;
    }
    const auto event = static_cast<std::size_t>(std::max(action.event, 0));
    if (action.kind == ActionKind::record) behind[event] = action.lane == Lane::communication;
    if (action.kind == ActionKind::wait) bound.actions[i].awaits = action.lane == Lane::compute && behind[event];
  }
}

void Engine::bind_collective(const Action& action, Bound& bound) const {
  const Attributes& attributes = plan_.schedules.task_of(action).instance.attributes;
  if (attributes.has("counts"))
    for (double count : attributes.list("counts")) bound.counts.push_back(static_cast<std::int64_t>(count));
  else
    bound.outputs = joined(bound.outputs, device_.traits().alignment);
}

Stream Engine::stream(Lane lane) {
  switch (lane) {
    case Lane::compute: return compute_;
    case Lane::copy_in: return device_.stream(StreamKind::copy_in);
    case Lane::copy_out: return device_.stream(StreamKind::copy_out);
    case Lane::communication: return device_.stream(StreamKind::communication);
    case Lane::host: break;
  }
  fail_internal("engine", "the host has no stream");
}

bool Engine::can_capture(const RunSchedule& schedule, const Action& action) const {
  if (!device_.traits().can_capture || action.lane == Lane::host) return false;
  auto store = [&](const Access& access) { return stores_[static_cast<std::size_t>(access.place.index)]; };
  switch (action.kind) {
    case ActionKind::host: return false;
    case ActionKind::collective: return communicator_ && communicator_->traits().can_capture;
    case ActionKind::put: return store(schedule.writes(action)[0])->traits().can_capture;
    case ActionKind::get: return store(schedule.reads(action)[0])->traits().can_capture;
    case ActionKind::copy:  // staging slots alternate, so that the addresses change
      return schedule.reads(action)[0].place.space != Space::staging;
    default: return true;
  }
}

// A run whose actions can all be captured is one graph, whatever its lanes. Of another one, each range of launches and
// collectives on the compute lane is a graph, and all else an action by itself.
void Engine::make_segments(const RunSchedule& schedule, BoundRun& bound) const {
  const std::vector<Action>& actions = schedule.actions;
  auto fits = [&](const Action& action) { return can_capture(schedule, action); };
  bound.segments.clear();
  bound.side_lanes.clear();
  if (!actions.empty() && std::all_of(actions.begin(), actions.end(), fits)) {
    bound.segments.push_back({.begin = 0, .end = actions.size(), .captured = true});
    for (int lane = 0; lane < kLanes; ++lane)
      if (static_cast<Lane>(lane) != Lane::compute && std::any_of(actions.begin(), actions.end(), [&](const Action& a) {
            return a.lane == static_cast<Lane>(lane);
          }))
        bound.side_lanes.push_back(static_cast<Lane>(lane));
    return;
  }
  for (std::size_t i = 0; i < actions.size(); i = bound.segments.back().end) {
    std::size_t end = i;
    while (end < actions.size() && is_segment_part(actions[end]) && fits(actions[end])) ++end;
    bound.segments.push_back({.begin = i, .end = std::max(end, i + 1), .captured = end > i});
  }
}

}  // namespace quern
