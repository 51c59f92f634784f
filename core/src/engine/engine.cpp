#include "engine/engine.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "program/names.h"
#include "quern/error.h"
#include "quern/numeric.h"

namespace quern {

namespace {

// Kernels trust the offsets, so a data source that gives others is stopped here.
void check_documents(const std::vector<std::int32_t>& starts, const Geometry& geometry) {
  bool good = starts.size() > 1 && starts.front() == 0 && starts.back() == geometry.tokens();
  for (std::size_t i = 1; good && i < starts.size(); ++i)
    good = starts[i - 1] < starts[i] && starts[i] <= (starts[i - 1] / geometry.sequence + 1) * geometry.sequence;
  if (!good)
    fail_internal("engine",
                  "the batch's documents are not ascending offsets from 0 to the number of tokens, one at "
                  "the start of each row");
}

/// Whether the action may be part of a graph of some of a run's actions.
bool is_segment_part(const Action& action) {
  return action.lane == Lane::compute && (action.kind == ActionKind::launch || action.kind == ActionKind::collective);
}

/// Views that lie side by side, with nothing but the gaps of alignment between them, as one.
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

/// A range of a device's profiler, from here to the end of the scope.
class Range {
 public:
  Range(Device& device, const char* name) : device_(device) { device_.begin_range(name); }
  ~Range() { device_.end_range(); }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  Device& device_;
};

}  // namespace

Engine::Engine(Device& device, Plan plan, std::vector<OffloadStore*> stores)
    : device_(device), plan_(std::move(plan)), stores_(std::move(stores)) {
  if (stores_.size() != plan_.stores.size()) fail_internal("engine", "not one store for each of the plan's");
  compute_ = device_.stream(StreamKind::compute);
  joint_ = device_.make_event();
  prepare_kernels();  // first, so that kernels are timed in memory that the arena will take, and a refusal comes early
  arena_ = static_cast<std::byte*>(device_.allocate(MemoryKind::device, static_cast<std::size_t>(plan_.device_bytes)));
  staging_ =
      static_cast<std::byte*>(device_.allocate(MemoryKind::pinned, static_cast<std::size_t>(plan_.pinned_bytes)));
  for (std::size_t i = 0; i < stores_.size(); ++i)
    store_slots_.push_back(stores_[i]->reserve(static_cast<std::size_t>(plan_.stores[i].bytes)));
  device_.fill(arena_, 0, static_cast<std::size_t>(plan_.device_bytes), compute_);
  for (int run = 0; run < kRuns; ++run) bind(static_cast<Run>(run));
  device_.synchronize(compute_);
}

Engine::~Engine() {
  device_.release(MemoryKind::pinned, staging_);
  device_.release(MemoryKind::device, arena_);
}

// ---- binding ----

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

// Staging memory has no address of its own: its slots take turns.
std::byte* Engine::address(const Place& place) const {
  if (!place.present()) return nullptr;
  switch (place.space) {
    case Space::device: return arena_ + place.offset;
    case Space::staging: return slot_ + place.offset;
    case Space::results: return staging_ + plan_.staging_slot_bytes * plan_.options.uploads + place.offset;
    case Space::store: break;
  }
  fail_internal("engine", "no memory of kind " + std::string(name_of(place.space)));
}

View Engine::view_of(const Access& access, const Operand& operand) const {
  return {address(access.place), operand.dtype, operand.extents};
}

void Engine::bind(Run run) {
  const RunSchedule& schedule = plan_.schedules[run];
  BoundRun& bound = runs_[static_cast<std::size_t>(run)];
  for (const Action& action : schedule.actions) {
    Bound made;
    if (action.task >= 0) {
      const OpInstance& instance = plan_.schedules.tasks[static_cast<std::size_t>(action.task)].instance;
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
  make_segments(schedule, bound);
}

void Engine::bind_collective(const Action& action, Bound& bound) const {
  const Attributes& attributes = plan_.schedules.tasks[static_cast<std::size_t>(action.task)].instance.attributes;
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
    case ActionKind::copy:  // staging slots take turns, so that the addresses change
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
  bound.graphs.clear();
  bound.side_lanes.clear();
  if (!actions.empty() && std::all_of(actions.begin(), actions.end(), fits)) {
    bound.segments.emplace_back(0, actions.size());
    for (int lane = 0; lane < kLanes; ++lane)
      if (static_cast<Lane>(lane) != Lane::compute && std::any_of(actions.begin(), actions.end(), [&](const Action& a) {
            return a.lane == static_cast<Lane>(lane);
          }))
        bound.side_lanes.push_back(static_cast<Lane>(lane));
  }
  for (std::size_t i = bound.segments.empty() ? 0 : actions.size(); i < actions.size();) {
    std::size_t end = i;
    while (end < actions.size() && is_segment_part(actions[end]) && fits(actions[end])) ++end;
    bound.segments.emplace_back(i, std::max(end, i + 1));
    i = bound.segments.back().second;
  }
  bound.graphs.resize(bound.segments.size());
}

// ---- running ----

void Engine::run(Run run, const std::function<void()>& host) {
  const RunSchedule& schedule = plan_.schedules[run];
  BoundRun& bound = runs_[static_cast<std::size_t>(run)];
  Range range(device_, schedule.name.c_str());
  for (std::size_t segment = 0; segment < bound.segments.size(); ++segment) run_segment(schedule, bound, segment, host);
}

void Engine::run_segment(const RunSchedule& schedule, BoundRun& bound, std::size_t segment,
                         const std::function<void()>& host) {
  const auto [begin, end] = bound.segments[segment];
  auto all = [&, begin = begin, end = end] {
    for (std::size_t i = begin; i < end; ++i) act(schedule, bound, i, host);
  };
  const bool whole = end - begin == schedule.actions.size();
  const Action& first = schedule.actions[begin];
  if (!can_capture(schedule, first) || !(whole || is_segment_part(first))) return all();
  // Inside the graph other lanes fork from the compute lane and join it; outside it stands for all of them.
  for (Lane lane : bound.side_lanes) order(Lane::compute, lane);
  std::unique_ptr<Graph>& graph = bound.graphs[segment];
  if (!graph)
    graph = device_.capture(compute_, [&] {
      for (Lane lane : bound.side_lanes) order(lane, Lane::compute);
      all();
      for (Lane lane : bound.side_lanes) order(Lane::compute, lane);
    });
  graph->launch(compute_);
  for (Lane lane : bound.side_lanes) order(lane, Lane::compute);
}

void Engine::order(Lane later, Lane earlier) {
  device_.record(joint_, stream(earlier));
  device_.wait(stream(later), joint_);
}

void Engine::synchronize() {
  for (StreamKind kind : {StreamKind::copy_in, StreamKind::copy_out, StreamKind::communication, StreamKind::compute})
    device_.synchronize(device_.stream(kind));
}

void Engine::act(const RunSchedule& schedule, BoundRun& bound, std::size_t index, const std::function<void()>& host) {
  const Action& action = schedule.actions[index];
  const Bound& made = bound.actions[index];
  switch (action.kind) {
    case ActionKind::launch: {
      Range range(device_, plan_.schedules.tasks[static_cast<std::size_t>(action.task)].name.c_str());
      return made.kernel->launch(made.inputs, made.outputs, {stream(action.lane), made.workspace});
    }
    case ActionKind::copy: {
      const Place& from = schedule.reads(action)[0].place;
      return device_.copy(address(schedule.writes(action)[0].place), address(from),
                          static_cast<std::size_t>(from.bytes), stream(action.lane));
    }
    case ActionKind::fill: {
      const Place& to = schedule.writes(action)[0].place;
      return device_.fill(address(to), action.byte, static_cast<std::size_t>(to.bytes), stream(action.lane));
    }
    case ActionKind::collective:
      return collect(plan_.schedules.tasks[static_cast<std::size_t>(action.task)], made, stream(action.lane));
    case ActionKind::record:
      return device_.record(bound.events[static_cast<std::size_t>(action.event)], stream(action.lane));
    case ActionKind::wait:
      if (action.lane == Lane::host) return device_.synchronize(bound.events[static_cast<std::size_t>(action.event)]);
      return device_.wait(stream(action.lane), bound.events[static_cast<std::size_t>(action.event)]);
    case ActionKind::host: return host();
    case ActionKind::put: {
      const Place &from = schedule.reads(action)[0].place, &to = schedule.writes(action)[0].place;
      const auto store = static_cast<std::size_t>(to.index);
      return stores_[store]->put(store_slots_[store], static_cast<std::size_t>(to.offset), address(from),
                                 static_cast<std::size_t>(to.bytes), stream(action.lane));
    }
    case ActionKind::get: {
      const Place &from = schedule.reads(action)[0].place, &to = schedule.writes(action)[0].place;
      const auto store = static_cast<std::size_t>(from.index);
      return stores_[store]->get(store_slots_[store], static_cast<std::size_t>(from.offset), address(to),
                                 static_cast<std::size_t>(from.bytes), stream(action.lane));
    }
  }
}

void Engine::collect(const Task& task, const Bound& bound, Stream stream) {
  if (!communicator_) fail_internal("engine", "no communicator for " + task.name);
  const OpInstance& op = task.instance;
  const bool maximum = op.attributes.has("reduction") && op.attributes.word("reduction") == "maximum";
  const Reduction reduction = maximum ? Reduction::maximum : Reduction::sum;
  if (op.kind == "all_gather")
    communicator_->all_gather(bound.inputs[0], bound.outputs[0], bound.counts, stream);
  else if (op.kind == "reduce_scatter")
    communicator_->reduce_scatter(bound.inputs[0], bound.outputs[0], bound.counts, reduction, stream);
  else
    for (const View& view : bound.outputs) communicator_->all_reduce(view, reduction, stream);
}

// ---- data ----

void Engine::upload(const Batch& batch, const StepState& state) {
  if (on_their_way_ == plan_.options.uploads) {  // the slot may still be read
    device_.synchronize(compute_);
    on_their_way_ = 0;
  }
  ++on_their_way_;
  slot_ = staging_ + next_slot_ * plan_.staging_slot_bytes;
  next_slot_ = (next_slot_ + 1) % plan_.options.uploads;
  run(Run::upload, [&] { fill_slot(batch, state); });
}

void Engine::fill_slot(const Batch& batch, const StepState& state) {
  std::int64_t tokens = plan_.options.geometry.tokens();
  if (static_cast<std::int64_t>(batch.tokens.size()) != tokens ||
      static_cast<std::int64_t>(batch.targets.size()) != tokens ||
      static_cast<std::int64_t>(batch.positions.size()) != tokens)
    fail_internal("engine",
                  "batch has " + std::to_string(batch.tokens.size()) + " tokens, the plan " + std::to_string(tokens));
  std::byte* next = slot_;
  auto put = [&](const void* data, std::size_t bytes) {
    std::memcpy(next, data, bytes);
    next += bytes;
  };
  for (const std::vector<std::int32_t>* words : {&batch.tokens, &batch.targets, &batch.positions})
    put(words->data(), words->size() * 4);
  if (plan_.options.documents) {
    std::vector<std::int32_t> documents = batch.documents;
    if (!documents.empty())
      check_documents(documents, plan_.options.geometry);
    else  // one document a row
      for (std::int64_t row = 0; row <= plan_.options.geometry.batch; ++row)
        documents.push_back(static_cast<std::int32_t>(row * plan_.options.geometry.sequence));
    documents.resize(static_cast<std::size_t>(tokens) + 1, static_cast<std::int32_t>(tokens));
    put(documents.data(), documents.size() * 4);
  }
  put(&state, sizeof state);
}

// ---- steps ----

void Engine::refresh() {
  run(Run::refresh);
  updated_ = false;
}

void Engine::gather() {
  if (!std::exchange(updated_, false)) return;
  run(Run::gather);
  synchronize();  // others need this rank's part, whatever its host waits for next
}

void Engine::micro_step(const Batch& batch, const StepState& state, At at, Observe observe) {
  if (observe == Observe::yes && !plan_.options.observe) fail_internal("engine", "observations are not in the plan");
  upload(batch, state);
  run(plan_.schedules.micro_step(at.first, at.last, observe == Observe::yes));
  updated_ = updated_ && !at.first;
}

void Engine::observe_weights() {
  if (!plan_.options.observe) fail_internal("engine", "observations are not in the plan");
  run(Run::observe_weights);
}

void Engine::join(Communicator& communicator) {
  communicator_ = &communicator;
  communicator.register_buffer(arena_, static_cast<std::size_t>(plan_.device_bytes));
  // Collectives may be part of graphs now.
  for (std::size_t run = 0; run < kRuns; ++run) make_segments(plan_.schedules.runs[run], runs_[run]);
}

void Engine::leave() {
  if (!communicator_) return;
  synchronize();
  for (BoundRun& run : runs_) run.graphs.clear();
  std::exchange(communicator_, nullptr)->unregister_buffer(arena_);
}

void Engine::update() {
  run(Run::update);
  updated_ = true;
}

Engine::StepResult Engine::result() {
  StepResult result;
  run(Run::result, [&] {
    const std::byte* read = address({.space = Space::results, .offset = 0});
    std::memcpy(&result.loss, read, sizeof(LossStats));
    std::memcpy(&result.update, read + sizeof(LossStats), sizeof(UpdateState));
  });
  on_their_way_ = 0;
  return result;
}

std::vector<LaunchTime> Engine::profile(const Batch& batch, const StepState& state) {
  upload(batch, state);
  std::vector<LaunchTime> times;
  std::vector<std::pair<Event, Event>> events;
  for (Run run : {Run::later, Run::update}) {
    const RunSchedule& schedule = plan_.schedules[run];
    for (std::size_t i = 0; i < schedule.actions.size(); ++i) {
      const Action& action = schedule.actions[i];
      const bool launch = action.kind == ActionKind::launch;
      if (launch) {
        events.emplace_back(device_.make_event(), device_.make_event());
        device_.record(events.back().first, compute_);
      }
      act(schedule, runs_[static_cast<std::size_t>(run)], i, {});
      if (!launch) continue;
      device_.record(events.back().second, compute_);
      times.push_back({&plan_.schedules.tasks[static_cast<std::size_t>(action.task)], 0, run == Run::update});
    }
  }
  synchronize();
  for (std::size_t i = 0; i < times.size(); ++i)
    times[i].milliseconds = device_.elapsed(events[i].first, events[i].second);
  return times;
}

void Engine::need_gathered() const {
  if (updated_ && !plan_.schedules[Run::gather].empty())
    fail_internal("engine", "the working copies that other ranks updated were not gathered");
}

LossStats Engine::evaluate(const Batch& batch) {
  need_gathered();
  upload(batch, {});
  run(Run::evaluate);
  LossStats stats;
  read(plan_.tensor(names::kEvalStats, "", -1), &stats);
  return stats;
}

std::vector<float> Engine::logits(const Batch& batch) {
  if (!plan_.options.logits) fail_internal("engine", "the plan has no logits program");
  need_gathered();
  upload(batch, {});
  run(Run::logits);
  const PlannedTensor& tensor = plan_.tensor(names::kLogits, "", -1);
  std::vector<std::uint16_t> narrow;
  std::vector<float> values(static_cast<std::size_t>(element_count(tensor.extents)));
  if (tensor.dtype == DType::f32) {
    read(tensor, values.data());
    return values;
  }
  narrow.resize(values.size());
  read(tensor, narrow.data());
  std::transform(narrow.begin(), narrow.end(), values.begin(), bf16_to_float);
  return values;
}

std::vector<float> Engine::next_logits(const Batch& batch, const std::vector<std::int32_t>& rows) {
  if (!plan_.options.next_logits) fail_internal("engine", "the plan has no program for the next token's logits");
  const std::int64_t tokens = plan_.options.geometry.tokens();
  bool good = static_cast<std::int64_t>(rows.size()) == plan_.options.geometry.batch;
  for (std::int32_t row : rows) good = good && row >= 0 && row < tokens;
  if (!good) fail_internal("engine", "not one index into the batch's tokens for each of its rows");
  need_gathered();
  upload(batch, {});
  write(plan_.tensor(names::kRows, "", -1), rows.data());
  run(Run::next_logits);
  const PlannedTensor& tensor = plan_.tensor(names::kNextLogits, "", -1);
  std::vector<float> values(static_cast<std::size_t>(element_count(tensor.extents)));
  read(tensor, values.data());
  return values;
}

}  // namespace quern
