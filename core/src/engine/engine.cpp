#include "engine/engine.h"

#include <cstring>
#include <utility>

#include "base/clock.h"
#include "engine/batch_inputs.h"
#include "engine/progress.h"
#include "program/names.h"
#include "quern/error.h"

namespace quern {

namespace {

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
  const double begin = now();
  prepare_kernels();  // first, so that kernels are timed in memory that the arena will take, and a refusal comes early
  spent_.kernels = now() - begin;
  arena_ = static_cast<std::byte*>(device_.allocate(MemoryKind::device, static_cast<std::size_t>(plan_.device_bytes)));
  staging_ =
      static_cast<std::byte*>(device_.allocate(MemoryKind::pinned, static_cast<std::size_t>(plan_.pinned_bytes)));
  for (std::size_t i = 0; i < stores_.size(); ++i) {
    store_slots_.push_back(stores_[i]->reserve(static_cast<std::size_t>(plan_.stores[i].bytes)));
    void* memory = plan_.stores[i].in_place ? stores_[i]->map(store_slots_.back()) : nullptr;
    store_memory_.push_back(static_cast<std::byte*>(memory));
  }
  device_.fill(arena_, 0, static_cast<std::size_t>(plan_.device_bytes), compute_);
  for (const RunSchedule& schedule : plan_.schedules.runs) bind(schedule);
  device_.synchronize(compute_);
  spent_.memory = now() - begin - spent_.kernels;
}

Engine::~Engine() {
  if (progress_) progress_->detach();
  device_.release(MemoryKind::pinned, staging_);
  device_.release(MemoryKind::device, arena_);
}

// ---- running ----

void Engine::run(const Run& run, const std::function<void()>& host) {
  const RunSchedule& schedule = plan_.schedules[run];
  if (schedule.empty()) return;
  BoundRun& bound = bound_.at(&schedule);
  Range range(device_, schedule.name.c_str());
  if (progress_) progress_->begin(schedule, stream(Lane::communication));
  for (Segment& segment : bound.segments) run_segment(schedule, bound, segment, host);
}

void Engine::run_segment(const RunSchedule& schedule, BoundRun& bound, Segment& segment,
                         const std::function<void()>& host) {
  auto all = [&] {
    for (std::size_t i = segment.begin; i < segment.end; ++i) act(schedule, bound, i, host);
  };
  if (!segment.captured) return all();
  // Inside the graph other lanes fork from the compute lane and join it; outside it stands for all of them.
  for (Lane lane : bound.side_lanes) order(Lane::compute, lane);
  if (!segment.graph) {
    const double begin = now();
    segment.graph = device_.capture(compute_, [&] {
      for (Lane lane : bound.side_lanes) order(lane, Lane::compute);
      all();
      for (Lane lane : bound.side_lanes) order(Lane::compute, lane);
    });
    spent_.graphs += now() - begin;
  }
  segment.graph->launch(compute_);
  for (Lane lane : bound.side_lanes) order(lane, Lane::compute);
}

void Engine::order(Lane later, Lane earlier) {
  device_.record(joint_, stream(earlier));
  wait(later, joint_, later == Lane::compute && earlier == Lane::communication);
}

void Engine::wait(Lane lane, Event event, bool awaits_collectives) {
  const bool marked = progress_ && awaits_collectives;
  if (marked) progress_->wait(stream(lane));
  device_.wait(stream(lane), event);
  if (marked) progress_->resume(stream(lane));
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
      Range range(device_, plan_.schedules.task_of(action).name.c_str());
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
    case ActionKind::collective: return collect(plan_.schedules.task_of(action), made, stream(action.lane));
    case ActionKind::record:
      return device_.record(bound.events[static_cast<std::size_t>(action.event)], stream(action.lane));
    case ActionKind::wait:
      if (action.lane == Lane::host) return device_.synchronize(bound.events[static_cast<std::size_t>(action.event)]);
      return wait(action.lane, bound.events[static_cast<std::size_t>(action.event)], made.awaits);
    case ActionKind::host: return host();
    case ActionKind::put:
      return put(schedule.writes(action)[0].place, address(schedule.reads(action)[0].place), stream(action.lane));
    case ActionKind::get:
      return get(schedule.reads(action)[0].place, address(schedule.writes(action)[0].place), stream(action.lane));
  }
}

void Engine::collect(const Task& task, const Bound& bound, Stream stream) {
  if (!communicator_) fail_internal("engine", "no communicator for " + task.name);
  if (progress_) progress_->enter(bound.number, stream);
  // An op of a program need not be in place.
  if (task.instance.inputs.size() == 1 && task.instance.kind == "all_reduce" &&
      bound.inputs[0].data != bound.outputs[0].data)
    device_.copy(bound.outputs[0].data, bound.inputs[0].data, bound.inputs[0].bytes(), stream);
  if (transfers_) call_communicator(task, bound, stream);
  if (progress_ && bound.closes) progress_->leave(bound.number, stream);
}

void Engine::call_communicator(const Task& task, const Bound& bound, Stream stream) {
  const OpInstance& op = task.instance;
  Communicator& ranks = *communicators_[static_cast<std::size_t>(task.axis)];
  const bool maximum = op.attributes.has("reduction") && op.attributes.word("reduction") == "maximum";
  const Reduction reduction = maximum ? Reduction::maximum : Reduction::sum;
  if (op.kind == "all_gather")
    ranks.all_gather(bound.inputs[0], bound.outputs[0], bound.counts, stream);
  else if (op.kind == "all_to_all")
    ranks.all_to_all(bound.inputs[0], bound.outputs[0], bound.counts, stream);
  else if (op.kind == "reduce_scatter")
    ranks.reduce_scatter(bound.inputs[0], bound.outputs[0], bound.counts, reduction, stream);
  else
    for (const View& view : bound.outputs) ranks.all_reduce(view, reduction, stream);
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
  run(Run::upload, [&] { std::memcpy(put_inputs(plan_, batch, slot_), &state, sizeof state); });
}

// ---- steps ----

void Engine::refresh() {
  apply_update();
  run(Run::refresh);
  if (communicator_) synchronize();  // as in apply_update()
}

void Engine::load(const std::function<void(const PlannedTensor&)>& supply) {
  std::vector<const PlannedTensor*> masters;  // in the order of the run
  for (const PlannedTensor& tensor : plan_.tensors)
    if (tensor.owner == TensorOwner::loading && tensor.kind == names::kMaster) masters.push_back(&tensor);
  std::size_t next = 0;
  run(Run::load, [&] { supply(*masters[next++]); });
  synchronize();
}

void Engine::micro_step(const Batch& batch, const StepState& state, At at, Observe observe) {
  if (observe == Observe::yes && !plan_.options.observe) fail_internal("engine", "observations are not in the plan");
  if (progress_) progress_->at_step(state.step + 1);
  upload(batch, state);
  const bool applies = at.first && update_ == Update::deferred;
  const Run micro_step = plan_.schedules.run_of(
      {.first = at.first, .last = at.last, .observed = observe == Observe::yes, .updates = applies});
  applies ? run_update(micro_step, Update::applied) : run(micro_step);
}

void Engine::observe_weights() {
  if (!plan_.options.observe) fail_internal("engine", "observations are not in the plan");
  run(Run::observe_weights);
}

void Engine::join(Communicator& communicator, Communicator* machine) {
  communicator_ = &communicator;
  communicators_ = {&communicator, machine ? machine : &communicator};
  if (communicator.size() > 1) progress_ = std::make_shared<Progress>(device_, plan_.schedules);
  communicator.register_buffer(arena_, static_cast<std::size_t>(plan_.device_bytes));
  // Collectives may be part of graphs now.
  for (auto& [schedule, bound] : bound_) make_segments(*schedule, bound);
}

void Engine::skip_transfers() {
  drop_graphs();
  transfers_ = false;
}

void Engine::drop_graphs() {
  synchronize();
  for (auto& [schedule, bound] : bound_)
    for (Segment& segment : bound.segments) segment.graph.reset();
}

void Engine::leave() {
  if (!communicator_) return;
  drop_graphs();
  std::exchange(communicator_, nullptr)->unregister_buffer(arena_);
}

void Engine::run_update(const Run& run, Update then) {
  update_ = Update::halfway;
  this->run(run);
  update_ = then;
}

void Engine::update() {
  run_update(Run::update, plan_.schedules[Run::apply].empty() ? Update::applied : Update::deferred);
}

void Engine::apply_update() {
  if (update_ != Update::deferred) return;
  run_update(Run::apply, Update::applied);
  if (communicator_) synchronize();  // others need this rank's part, whatever its host waits for next
}

void Engine::with(Weights weights, const std::function<void()>& work) {
  if (weights_ == weights || plan_.schedules[Run::exchange].empty()) return work();
  const Weights before = weights_;
  exchange();
  try {
    work();
  } catch (...) {
    if (weights_ != before) exchange();
    throw;
  }
  exchange();
}

void Engine::exchange() {
  apply_update();
  run_update(Run::exchange, Update::applied);
  weights_ = weights_ == Weights::trained ? Weights::evaluated : Weights::trained;
  refresh();
}

void Engine::need_applied() {
  if (update_ == Update::deferred && plan_.options.state.ranks > 1)
    fail_internal("engine", "all ranks together did not apply the deferred update");
  apply_update();
}

Engine::StepResult Engine::result() {
  StepResult result;
  run(Run::result, [&] {
    const std::byte* read = address({.space = Space::results, .offset = 0});
    std::memcpy(&result.loss, read, sizeof(LossStats));
    std::memcpy(&result.update, read + sizeof(LossStats), sizeof(UpdateState));
  });
  on_their_way_ = 0;
  if (progress_) progress_->at_step(0);
  check_stores();
  return result;
}

std::map<Run, std::vector<ActionTime>> Engine::profile(const Batch& batch, const StepState& state,
                                                       std::int64_t micro_batches) {
  const bool applies = std::exchange(update_, Update::applied) == Update::deferred;
  std::vector<Run> runs{plan_.schedules.run_of({.last = micro_batches == 1, .updates = applies}), Run::later};
  if (micro_batches > 1) runs.push_back(plan_.schedules.run_of({.first = false}));
  runs.insert(runs.end(), {Run::update, Run::apply});
  std::map<Run, std::vector<ActionTime>> times;
  std::vector<Event> events;
  for (const Run& run : runs) {
    upload(batch, state);
    synchronize();
    if (!times.contains(run)) times[run] = profile(run, events);
  }
  return times;
}

// The first event is where the run begins.
std::vector<ActionTime> Engine::profile(const Run& run, std::vector<Event>& events) {
  const RunSchedule& schedule = plan_.schedules[run];
  const std::vector<Action>& actions = schedule.actions;
  std::size_t used = 0;
  auto mark = [&](Lane lane) {
    if (used == events.size()) events.push_back(device_.make_event());
    device_.record(events[used], stream(lane));
    return used++;
  };
  std::vector<std::pair<std::size_t, std::size_t>> marks(actions.size());
  mark(Lane::compute);
  for (std::size_t i = 0; i < actions.size(); ++i) {
    const ActionKind kind = actions[i].kind;
    const bool waits = kind == ActionKind::wait && actions[i].lane == Lane::compute;
    const bool works = actions[i].lane != Lane::host && kind != ActionKind::record && kind != ActionKind::wait;
    if (works) marks[i].first = mark(actions[i].lane);
    act(schedule, bound_.at(&schedule), i, {});
    if (works || waits) marks[i].second = mark(actions[i].lane);
    if (waits) marks[i].first = marks[i].second;
  }
  synchronize();
  std::vector<ActionTime> times(actions.size());
  auto seconds = [&](std::size_t event) { return device_.elapsed(events[0], events[event]) / 1e3; };
  for (std::size_t i = 0; i < actions.size(); ++i)
    if (marks[i].second > 0) times[i] = {seconds(marks[i].first), seconds(marks[i].second)};
  return times;
}

LossStats Engine::evaluate(const Batch& batch) {
  need_applied();
  upload(batch, {});
  run(Run::evaluate);
  LossStats stats;
  read(plan_.tensor({names::kEvalStats}), &stats);
  return stats;
}

std::vector<float> Engine::logits(const Batch& batch) {
  if (!plan_.options.logits) fail_internal("engine", "the plan has no logits program");
  need_applied();
  upload(batch, {});
  run(Run::logits);
  return read_floats(plan_.tensor({names::kLogits}));
}

std::vector<float> Engine::next_logits(const Batch& batch, const std::vector<std::int32_t>& rows) {
  if (!plan_.options.next_logits) fail_internal("engine", "the plan has no program for the next token's logits");
  const std::int64_t tokens = plan_.options.geometry.tokens();
  bool good = static_cast<std::int64_t>(rows.size()) == plan_.options.geometry.batch;
  for (std::int32_t row : rows) good = good && row >= 0 && row < tokens;
  if (!good) fail_internal("engine", "not one index into the batch's tokens for each of its rows");
  need_applied();
  upload(batch, {});
  write(plan_.tensor({names::kRows}), rows.data());
  run(Run::next_logits);
  return read_floats(plan_.tensor({names::kNextLogits}));
}

}  // namespace quern
