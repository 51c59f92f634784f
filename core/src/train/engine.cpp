#include "train/engine.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "program/passes/observe.h"
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

std::string launch_name(const Program& program, const Op& op) {
  ValueId made = op.outputs[0];
  return made == kNoValue ? op.kind : op.kind + " " + program[made].name;
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

Engine::Engine(Device& device, Plan plan) : device_(device), plan_(std::move(plan)) {
  compute_ = device_.stream(StreamKind::compute);
  make_schedules();  // first, so that kernels are timed in memory that the arena will take, and a refusal comes early
  arena_ = static_cast<std::byte*>(device_.allocate(MemoryKind::device, static_cast<std::size_t>(plan_.device_bytes)));
  staging_ =
      static_cast<std::byte*>(device_.allocate(MemoryKind::pinned, static_cast<std::size_t>(plan_.pinned_bytes)));
  device_.fill(arena_, 0, static_cast<std::size_t>(plan_.device_bytes), compute_);
  make_schedules();
  device_.synchronize(compute_);
}

Engine::~Engine() {
  device_.release(MemoryKind::pinned, staging_);
  device_.release(MemoryKind::device, arena_);
}

// ---- binding ----

void Engine::make_schedules() {
  refresh_ = refreshes();
  evaluate_ = evaluation(plan_.head_evaluate);
  if (plan_.options.logits) logits_ = evaluation(plan_.head_logits);
  if (plan_.options.next_logits) next_logits_ = evaluation(plan_.head_next);
  if (plan_.options.train) {
    first_ = training(true, Observe::no);
    later_ = training(false, Observe::no);
    update_ = updates();
  }
  if (plan_.options.train && plan_.options.observe) {
    observed_first_ = training(true, Observe::yes);
    observed_later_ = training(false, Observe::yes);
    observe_weights_ = weight_observations();
  }
}

const Kernel* Engine::kernel_for(const OpInstance& instance) {
  auto& known = kernels_[instance.kind];
  for (const auto& [seen, kernel] : known)
    if (seen == instance) return kernel.get();
  known.emplace_back(instance, device_.prepare(instance));
  return known.back().second.get();
}

View Engine::view_of(const PlacedProgram& placed, ValueId id, const Site& site) const {
  View view;
  if (id == kNoValue) return view;
  const Value& value = placed.program[id];
  view.dtype = value.dtype;
  view.extents = extents_at(value.shape, plan_.options.geometry.tokens());
  std::int64_t offset = offset_of(plan_, placed, id, site);
  if (offset >= 0) view.data = arena_ + offset;
  return view;
}

// Gradients and statistics are written by their first producer and added to by later ones: `written` holds those that
// have something; a null `written` means that all have. Observations are made by schedules that observe only.
void Engine::add_program(Schedule& schedule, const PlacedProgram& placed, const Site& site, Written* written,
                         Observe observe) {
  const Unobserved rest = without_observations(placed.program);
  const std::vector<bool> read = observe == Observe::yes ? read_values(placed.program) : rest.read;
  for (std::size_t i = 0; i < placed.program.ops.size(); ++i) {
    const Op& op = placed.program.ops[i];
    if (observe == Observe::no && !rest.runs[i]) continue;
    OpInstance instance = instantiate(placed.program, op, plan_.options.geometry, read);
    for (std::size_t o = 0; o < op.outputs.size(); ++o) {
      if (!sums_up(placed.program, op, o) || !instance.outputs[o].present) continue;
      const Value& value = placed.program[op.outputs[o]];
      std::string key =
          value.role == Role::state ? value.name : std::to_string(offset_of(plan_, placed, op.outputs[o], site));
      instance.outputs[o].accumulate = !written || !written->insert(std::move(key)).second;
    }
    const Kernel* kernel = kernel_for(instance);
    if (arena_ == nullptr) continue;
    BoundLaunch launch{.kernel = kernel,
                       .op = &op,
                       .program = &placed.program,
                       .inputs = {},
                       .outputs = {},
                       .workspace = nullptr,
                       .name = launch_name(placed.program, op)};
    for (ValueId id : op.inputs) launch.inputs.push_back(view_of(placed, id, site));
    for (std::size_t o = 0; o < op.outputs.size(); ++o) {
      launch.outputs.push_back(view_of(placed, op.outputs[o], site));
      if (!instance.outputs[o].present) launch.outputs.back().data = nullptr;
    }
    if (placed.workspace_offsets[i] >= 0)
      launch.workspace = arena_ + plan_.transient_offset + placed.workspace_offsets[i];
    schedule.push_back(std::move(launch));
  }
}

Engine::Schedule Engine::training(bool first, Observe observe) {
  Schedule schedule;
  Written written_storage;
  Written* written = first ? &written_storage : nullptr;
  int layers = static_cast<int>(plan_.model.layers);
  using Pass = Site::Pass;
  add_program(schedule, plan_.embed, {Pass::forward, -1, -1, 0}, written, observe);
  for (int layer = 0; layer < layers; ++layer)
    add_program(schedule, plan_.layer_class(layer).forward, {Pass::forward, layer, layer, layer + 1}, written, observe);
  add_program(schedule, plan_.head_train, {Pass::forward, -1, layers, layers}, written, observe);
  for (int layer = layers; layer-- > 0;)
    add_program(schedule, plan_.layer_class(layer).backward, {Pass::backward, layer, layer + 1, layer}, written,
                observe);
  add_program(schedule, plan_.embed_backward, {Pass::backward, -1, 0, -1}, written, observe);
  return schedule;
}

Engine::Schedule Engine::evaluation(const PlacedProgram& head) {
  Schedule schedule;
  Written written;
  int layers = static_cast<int>(plan_.model.layers);
  using Pass = Site::Pass;
  add_program(schedule, plan_.embed, {Pass::evaluate, -1, -1, 0}, &written);
  for (int layer = 0; layer < layers; ++layer)
    add_program(schedule, plan_.layer_class(layer).evaluate, {Pass::evaluate, layer, layer, layer + 1}, &written);
  add_program(schedule, head, {Pass::evaluate, -1, layers, -1}, &written);
  return schedule;
}

Engine::Schedule Engine::updates() {
  Schedule schedule;
  add_program(schedule, plan_.norm, {}, nullptr);
  add_program(schedule, plan_.update, {}, nullptr);
  for (BoundLaunch& launch : refreshes()) schedule.push_back(std::move(launch));
  add_program(schedule, plan_.head_advance, {}, nullptr);
  for (int layer = 0; layer < static_cast<int>(plan_.model.layers); ++layer)
    add_program(schedule, plan_.layer_class(layer).advance, {Site::Pass::forward, layer, -1, -1}, nullptr);
  return schedule;
}

Engine::Schedule Engine::refreshes() {
  Schedule schedule;
  for (const ParameterPlan& parameter : plan_.parameters)
    for_each_layer(parameter.spec, static_cast<int>(plan_.model.layers), [&](int layer) {
      add_program(schedule, plan_.refresh_of(parameter, layer), {Site::Pass::forward, layer, -1, -1}, nullptr);
    });
  return schedule;
}

Engine::Schedule Engine::weight_observations() {
  Schedule schedule;
  Written written;
  for (const ParameterPlan& parameter : plan_.parameters)
    for_each_layer(parameter.spec, static_cast<int>(plan_.model.layers), [&](int layer) {
      add_program(schedule, plan_.observe_of(parameter, layer), {Site::Pass::forward, layer, -1, -1}, &written,
                  Observe::yes);
    });
  return schedule;
}

// ---- running ----

void Engine::launch(const BoundLaunch& launch) {
  Range range(device_, launch.name.c_str());
  launch.kernel->launch(launch.inputs, launch.outputs, {compute_, launch.workspace});
}

void Engine::run(const char* name, Schedule& schedule, std::unique_ptr<Graph>& graph) {
  Range range(device_, name);
  auto launch_all = [&] {
    for (const BoundLaunch& bound : schedule) launch(bound);
  };
  if (!device_.traits().can_capture) return launch_all();
  if (!graph) graph = device_.capture(compute_, launch_all);
  graph->launch(compute_);
}

View Engine::tensor_view(const std::string& kind) const {
  const PlannedTensor& tensor = plan_.tensor(kind, "", -1);
  return {arena_ + tensor.offset, tensor.dtype, tensor.extents};
}

void Engine::upload(const Batch& batch, const StepState& state) {
  std::int64_t tokens = plan_.options.geometry.tokens();
  if (static_cast<std::int64_t>(batch.tokens.size()) != tokens ||
      static_cast<std::int64_t>(batch.targets.size()) != tokens ||
      static_cast<std::int64_t>(batch.positions.size()) != tokens)
    fail_internal("engine",
                  "batch has " + std::to_string(batch.tokens.size()) + " tokens, the plan " + std::to_string(tokens));
  if (on_their_way_ == plan_.options.uploads) {  // the slot may still be read
    device_.synchronize(compute_);
    on_their_way_ = 0;
  }
  ++on_their_way_;
  std::byte* slot = staging_ + next_slot_ * plan_.staging_slot_bytes;
  next_slot_ = (next_slot_ + 1) % plan_.options.uploads;
  auto send = [&](const char* name, const void* data, std::size_t bytes) {
    std::memcpy(slot, data, bytes);
    device_.copy(tensor_view(name).data, slot, bytes, compute_);
    slot += bytes;
  };
  send("tokens", batch.tokens.data(), batch.tokens.size() * 4);
  send("targets", batch.targets.data(), batch.targets.size() * 4);
  send("positions", batch.positions.data(), batch.positions.size() * 4);
  if (plan_.options.documents) {
    std::vector<std::int32_t> documents = batch.documents;
    if (!documents.empty())
      check_documents(documents, plan_.options.geometry);
    else  // one document a row
      for (std::int64_t row = 0; row <= plan_.options.geometry.batch; ++row)
        documents.push_back(static_cast<std::int32_t>(row * plan_.options.geometry.sequence));
    documents.resize(static_cast<std::size_t>(tokens) + 1, static_cast<std::int32_t>(tokens));
    send("documents", documents.data(), documents.size() * 4);
  }
  send("step", &state, sizeof state);
}

void Engine::write(const PlannedTensor& tensor, const void* host) {
  device_.copy(arena_ + tensor.offset, host, static_cast<std::size_t>(tensor.bytes()), compute_);
  device_.synchronize(compute_);
}

void Engine::read(const PlannedTensor& tensor, void* host) {
  device_.copy(host, arena_ + tensor.offset, static_cast<std::size_t>(tensor.bytes()), compute_);
  device_.synchronize(compute_);
}

void Engine::read(const std::vector<PlannedTensor>& tensors, std::byte* host) {
  for (const PlannedTensor& tensor : tensors) {
    device_.copy(host, arena_ + tensor.offset, static_cast<std::size_t>(tensor.bytes()), compute_);
    host += tensor.bytes();
  }
  device_.synchronize(compute_);
}

void Engine::refresh() { run("refresh", refresh_, refresh_graph_); }

void Engine::micro_step(const Batch& batch, const StepState& state, Observe observe) {
  if (observe == Observe::yes && !plan_.options.observe) fail_internal("engine", "observations are not in the plan");
  upload(batch, state);
  const bool first = state.micro_step == 0;
  if (observe == Observe::no && first)
    run("first micro-step", first_, first_graph_);
  else if (observe == Observe::no)
    run("later micro-step", later_, later_graph_);
  else if (first)
    run("first micro-step, observed", observed_first_, observed_first_graph_);
  else
    run("later micro-step, observed", observed_later_, observed_later_graph_);
}

void Engine::observe_weights() {
  if (!plan_.options.observe) fail_internal("engine", "observations are not in the plan");
  run("observe weights", observe_weights_, observe_weights_graph_);
}

void Engine::share_memory(Communicator& communicator) {
  communicator.register_buffer(arena_, static_cast<std::size_t>(plan_.device_bytes));
}

void Engine::reduce(Communicator& communicator) {
  Range range(device_, "reduce");
  for (const PlannedTensor& tensor : plan_.tensors)
    if (tensor.kind == "gradient" || tensor.kind == "loss_stats")
      communicator.all_reduce({arena_ + tensor.offset, tensor.dtype, tensor.extents}, Reduction::sum, compute_);
}

void Engine::update() { run("update", update_, update_graph_); }

Engine::StepResult Engine::result() {
  StepResult result;
  std::byte* slot = staging_ + plan_.staging_slot_bytes * plan_.options.uploads;
  device_.copy(slot, tensor_view("loss_stats").data, sizeof(LossStats), compute_);
  device_.copy(slot + sizeof(LossStats), tensor_view("update").data, sizeof(UpdateState), compute_);
  device_.synchronize(compute_);
  on_their_way_ = 0;
  std::memcpy(&result.loss, slot, sizeof(LossStats));
  std::memcpy(&result.update, slot + sizeof(LossStats), sizeof(UpdateState));
  return result;
}

std::vector<LaunchTime> Engine::profile(const Batch& batch, const StepState& state) {
  upload(batch, state);
  std::vector<LaunchTime> times;
  for (Schedule* schedule : {&later_, &update_}) {
    for (const BoundLaunch& launch : *schedule) {
      OpInstance instance =
          instantiate(*launch.program, *launch.op, plan_.options.geometry, without_observations(*launch.program).read);
      times.push_back({&launch, cost_of(plan_.ops.at(launch.op->kind), instance), 0, schedule == &update_});
    }
  }
  std::vector<Event> events;
  for (std::size_t i = 0; i <= times.size(); ++i) events.push_back(device_.make_event());
  device_.record(events[0], compute_);
  for (std::size_t i = 0; i < times.size(); ++i) {
    launch(*times[i].launch);
    device_.record(events[i + 1], compute_);
  }
  device_.synchronize(compute_);
  for (std::size_t i = 0; i < times.size(); ++i) times[i].milliseconds = device_.elapsed(events[i], events[i + 1]);
  return times;
}

LossStats Engine::evaluate(const Batch& batch) {
  upload(batch, {});
  run("evaluate", evaluate_, evaluate_graph_);
  LossStats stats;
  read(plan_.tensor("eval_stats", "", -1), &stats);
  return stats;
}

std::vector<float> Engine::logits(const Batch& batch) {
  if (!plan_.options.logits) fail_internal("engine", "the plan has no logits program");
  upload(batch, {});
  run("logits", logits_, logits_graph_);
  const PlannedTensor& tensor = plan_.tensor("logits", "", -1);
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
  upload(batch, {});
  write(plan_.tensor("rows", "", -1), rows.data());
  run("next logits", next_logits_, next_logits_graph_);
  const PlannedTensor& tensor = plan_.tensor("next_logits", "", -1);
  std::vector<float> values(static_cast<std::size_t>(element_count(tensor.extents)));
  read(tensor, values.data());
  return values;
}

}  // namespace quern
