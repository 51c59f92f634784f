#include "plan/schedule/make_schedules.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <set>
#include <tuple>
#include <utility>

#include "plan/schedule/order.h"
#include "plan/schedule/places.h"
#include "program/names.h"
#include "program/passes/observe.h"
#include "quern/step_state.h"

namespace quern {

namespace {

bool observes(const Run& run) { return run.step.observed || run == Run::observe_weights; }

/// Runs in which a gradient, a sum of losses or an observation is written by its first producer and added to by those
/// that follow; in all others they are added to.
bool starts_sums(const Run& run) {
  return run.step.first || run == Run::evaluate || run == Run::logits || run == Run::next_logits ||
         run == Run::observe_weights;
}

std::string launch_name(const Program& program, const Op& op) {
  const ValueId made = op.outputs[0];
  return made == kNoValue ? op.kind : op.kind + " " + program[made].name;
}

/// Programs that schedules have.
enum class Programs : std::uint8_t { all, in_slots /* those that use values in slots */ };

class Maker {
 public:
  explicit Maker(const Plan& plan, Programs programs) : plan_(plan), programs_(programs), places_(plan, set_.values) {}

  ScheduleSet make(const std::function<bool(const Run&)>& wanted) {
    for (const StorePlan& store : plan_.stores) {
      set_.in_place.push_back(store.in_place);
      set_.rates.push_back(store.rates);
    }
    for (const PlannedTensor& tensor : plan_.tensors)
      if (tensor.over_ranks) add_over_ranks(tensor);
    for (const Run& run : all_runs()) {
      if (!wanted(run)) continue;
      std::vector<bool> has_sum;
      std::vector<Stop> order = order_of(plan_, run);
      places_.begin(run_memory(plan_, order));
      for (const Stop& stop : order) {
        if (stop.program) add_program(run, stop, has_sum);
        if (stop.loads) add_load(set_[run], stop);
        if (stop.flow == Stop::Flow::forward) put_streams(set_[run], stop);
        add_meeting(run, stop);
      }
      if (run == Run::upload) add_upload();
      if (run == Run::update && plan_.defers_update()) keep_step();
      if (run == Run::result && plan_.options.train) add_result();
      set_[run].starts_sums = starts_sums(run);
      number_versions(set_, set_[run]);
    }
    std::erase_if(set_.runs, [](const RunSchedule& schedule) { return schedule.empty(); });
    if (programs_ == Programs::in_slots) return std::move(set_);
    for (const PlannedTensor& tensor : plan_.tensors) {
      if (tensor.owner == TensorOwner::loading || tensor.owner == TensorOwner::activation) continue;
      const Access access = places_.tensor(tensor);
      set_.lasting.resize(set_.values.size(), false);
      set_.lasting[static_cast<std::size_t>(access.value)] = true;
      if (tensor.owner == TensorOwner::master || tensor.owner == TensorOwner::optimizer ||
          tensor.owner == TensorOwner::precision || tensor.kind == names::kRows || tensor.kind == names::kMaster ||
          tensor.kind == names::kPartials)
        set_.held.push_back(access);
    }
    set_.lasting.resize(set_.values.size(), false);
    return std::move(set_);
  }

 private:
  bool in_tree() const { return plan_.options.state.in_tree > 0; }
  /// Whose shards are the whole.
  Axis shards_axis() const { return plan_.options.state.machines > 1 ? Axis::machine : Axis::ranks; }

  // What a program runs, by whether it observes.
  struct Reading {
    std::vector<bool> runs, read;
  };
  struct Known {
    Reading plain, observed;
    std::map<std::pair<std::size_t, std::vector<bool>>, std::int32_t> tasks;  ///< by op and the outputs it adds to
    std::map<std::pair<std::size_t, std::vector<bool>>, std::int32_t> observed_tasks;
  };

  Known& known(const PlacedProgram& placed) {
    auto [it, fresh] = known_.try_emplace(&placed);
    if (!fresh) return it->second;
    Unobserved rest = without_observations(placed.program);
    it->second.plain = {std::move(rest.runs), std::move(rest.read)};
    it->second.observed = {std::vector<bool>(placed.program.ops.size(), true), read_values(placed.program)};
    return it->second;
  }

  void add_program(const Run& run, const Stop& stop, std::vector<bool>& has_sum) {
    const Program& program = stop.program->program;
    if (program.ops.empty() || without_slots_.contains({stop.program, stop.flow, stop.layer})) return;
    const std::vector<Access> accesses = places_.of(stop);
    if (programs_ == Programs::in_slots &&
        std::none_of(accesses.begin(), accesses.end(), [&](const Access& a) { return set_.has_slot(a.place); })) {
      without_slots_.emplace(stop.program, stop.flow, stop.layer);
      return;
    }
    Known& known = this->known(*stop.program);
    const Reading& reading = observes(run) ? known.observed : known.plain;
    auto& tasks = observes(run) ? known.observed_tasks : known.tasks;
    has_sum.resize(set_.values.size(), false);
    std::vector<bool> in_slot(set_.values.size(),
                              false);  // as has_sum, of gradients that are reduced behind this program
    for (std::size_t i = 0; i < program.ops.size(); ++i) {
      const Op& op = program.ops[i];
      if (!reading.runs[i] || (stop.flow == Stop::Flow::evaluate && advances_states(op))) continue;
      std::vector<bool> adds(op.outputs.size(), false);
      for (std::size_t o = 0; o < op.outputs.size(); ++o) {
        if (!sums_up(program, plan_.ops, op, o) || !reading.read[static_cast<std::size_t>(op.outputs[o])]) continue;
        const bool over_ranks = accesses[static_cast<std::size_t>(op.outputs[o])].place.space == Space::ranks;
        std::vector<bool>::reference has = (over_ranks ? in_slot : has_sum)[value_of(accesses, op.outputs[o])];
        const bool alone = over_ranks || (in_tree() && program[op.outputs[o]].role != Role::observation);
        adds[o] = !(starts_sums(run) || alone) || has;
        has = true;
      }
      auto [it, fresh] = tasks.try_emplace({i, adds}, 0);
      if (fresh) it->second = add_task(program, op, reading.read, adds);
      add_launch(set_[run], stop, i, it->second, accesses);
    }
  }

  /// Whether all that it makes are sums that states of the model advance by: an evaluation leaves these alone.
  bool advances_states(const Op& op) const {
    const OpSpec& spec = plan_.ops.at(op.kind);
    return spec.statistics && !spec.objective;
  }

  static std::size_t value_of(const std::vector<Access>& accesses, ValueId id) {
    return static_cast<std::size_t>(accesses[static_cast<std::size_t>(id)].value);
  }

  // States of the precision backend may be written in place by the ops that take them; one that observes only reads.
  std::vector<std::int32_t> changed_inputs(const Program& program, const Op& op) const {
    std::vector<std::int32_t> changed;
    const bool observes = std::all_of(op.outputs.begin(), op.outputs.end(), [&](ValueId id) {
      return id == kNoValue || program[id].role == Role::observation;
    });
    for (std::size_t i = 0; i < op.inputs.size() && !observes; ++i) {
      if (op.inputs[i] == kNoValue || program[op.inputs[i]].role != Role::state) continue;
      const StateSpec* state = program.state(program[op.inputs[i]].name);
      if (state && state->written) changed.push_back(static_cast<std::int32_t>(i));
    }
    return changed;
  }

  std::int32_t add_task(const Program& program, const Op& op, const std::vector<bool>& read,
                        const std::vector<bool>& adds) {
    Task task{.instance = instantiate(program, op, plan_.options.geometry, read),
              .name = launch_name(program, op),
              .program = program.name,
              .phase = op.phase,
              .cost = {},
              .changed = changed_inputs(program, op),
              .summed = {},
              .overwrites = plan_.ops.at(op.kind).may_overwrite,
              .exclusive = plan_.exclusive.contains(op.kind)};
    for (std::size_t o = 0; o < adds.size(); ++o) {
      task.instance.outputs[o].accumulate = adds[o];
      if (adds[o]) task.summed.push_back(static_cast<std::int32_t>(o));
    }
    task.cost = cost_of(plan_.ops.at(op.kind), task.instance);
    if (op.kind == kAllReduce) {
      task.instance.attributes.set("ranks", std::int64_t{plan_.options.state.ranks});
      if (op.attributes.has("axis") && op.attributes.word("axis") == name_of(Axis::machine)) task.axis = Axis::machine;
    }
    set_.tasks.push_back(std::move(task));
    return static_cast<std::int32_t>(set_.tasks.size() - 1);
  }

  /// Or a collective, on the lane of all others, so that they have one order.
  void add_launch(RunSchedule& schedule, const Stop& stop, std::size_t index, std::int32_t task,
                  const std::vector<Access>& accesses) {
    const Op& op = stop.program->program.ops[index];
    const OpInstance& instance = set_.tasks[static_cast<std::size_t>(task)].instance;
    auto access_of = [&](ValueId id) { return id == kNoValue ? Access{} : accesses[static_cast<std::size_t>(id)]; };
    reads_.clear();
    writes_.clear();
    for (ValueId id : op.inputs) reads_.push_back(access_of(id));
    for (std::size_t o = 0; o < op.outputs.size(); ++o)
      writes_.push_back(instance.outputs[o].present ? access_of(op.outputs[o]) : Access{});
    const std::int64_t workspace = stop.program->workspace_offsets[index];
    Access scratch;
    if (workspace >= 0)
      scratch.place = {Space::device, 0, plan_.transient_offset + stop.locals + workspace,
                       stop.program->workspace_bytes[index]};
    const bool meets = op.kind == kAllReduce;
    if (!meets) writes_.push_back(scratch);
    schedule.add({.kind = meets ? ActionKind::collective : ActionKind::launch,
                  .lane = meets ? Lane::communication : Lane::compute,
                  .task = task,
                  .layer = stop.layer,
                  .window = stop.window},
                 reads_, writes_);
  }

  // From the buffer through which the next program gets it, so that nothing has to come back for that.
  void put_streams(RunSchedule& schedule, const Stop& stop) {
    for (const auto& [here, home] : places_.kept_streams(stop))
      schedule.add({.kind = ActionKind::put, .lane = Lane::copy_out, .layer = stop.layer, .window = stop.window},
                   {&here, 1}, {&home, 1});
  }

  void add_copy(RunSchedule& schedule, const Access& from, const Access& to) {
    schedule.add({.kind = ActionKind::copy}, std::span(&from, 1), std::span(&to, 1));
  }

  std::int32_t add_value(std::string name) {
    set_.values.push_back(std::move(name));
    return static_cast<std::int32_t>(set_.values.size() - 1);
  }

  // The host fills a slot of the staging memory, from which the tensors are sent.
  void add_upload() {
    RunSchedule& schedule = set_[Run::upload];
    std::vector<Access> from, to;
    std::int64_t offset = 0;
    for (const Value& input : plan_.uploaded) {
      const PlannedTensor& tensor = plan_.tensor({input.name});
      to.push_back(places_.tensor(tensor));
      from.push_back({{Space::staging, 0, offset, tensor.bytes()}, add_value("staged " + input.name)});
      offset += tensor.bytes();
    }
    schedule.add({.kind = ActionKind::host, .lane = Lane::host}, {}, from);
    for (std::size_t i = 0; i < from.size(); ++i) add_copy(schedule, from[i], to[i]);
  }

  // The engine's caller writes it.
  void add_load(RunSchedule& schedule, const Stop& stop) {
    const Access master = places_.tensor(plan_.tensor({names::kMaster, stop.loads->spec.name, stop.layer}));
    schedule.add({.kind = ActionKind::host, .lane = Lane::host, .layer = stop.layer, .window = stop.window}, {},
                 {&master, 1});
  }

  // The next upload brings another step's state.
  void keep_step() {
    add_copy(set_[Run::update], places_.tensor(plan_.tensor({names::kStep})),
             places_.tensor(plan_.tensor({names::kUpdateStep})));
  }

  // ---- what ranks do together: on a lane of its own, so that programs go on meanwhile ----

  struct Collective {
    const char* kind;
    Attributes attributes;
    std::vector<const PlannedTensor*> reads, writes;
    ActionKind action = ActionKind::collective;  ///< or launch: an op on the gathered value
    Axis axis = Axis::ranks;
  };

  void add_collective(RunSchedule& schedule, const Collective& wanted, std::int32_t window = -1) {
    if (wanted.reads.empty()) return;
    const std::int32_t task = task_of(wanted);
    reads_.clear();
    writes_.clear();
    for (const PlannedTensor* tensor : wanted.reads) reads_.push_back(places_.tensor(*tensor));
    for (const PlannedTensor* tensor : wanted.writes) writes_.push_back(places_.tensor(*tensor));
    if (wanted.action == ActionKind::launch) writes_.push_back({});  // no workspace
    schedule.add({.kind = wanted.action,
                  .lane = Lane::communication,
                  .task = task,
                  .layer = named_by(wanted).layer,
                  .window = window},
                 reads_, writes_);
  }

  static const PlannedTensor& named_by(const Collective& wanted) {
    return wanted.writes[0]->parameter.empty() ? *wanted.reads[0] : *wanted.writes[0];
  }

  std::int32_t task_of(const Collective& wanted) {
    const PlannedTensor& named = named_by(wanted);
    Task task{
        .instance = {.kind = wanted.kind, .inputs = {}, .outputs = {}, .attributes = wanted.attributes, .geometry = {}},
        .name = std::string(wanted.kind) + " " + named.kind + (named.part == TensorId::kOwn ? " in a shard" : ""),
        .program = "collectives",
        .axis = wanted.axis};
    task.instance.attributes.set("ranks", std::int64_t{plan_.options.state.ranks});
    auto operand_of = [](const PlannedTensor& tensor) {
      return Operand{.dtype = tensor.dtype, .extents = tensor.extents, .present = true};
    };
    for (const PlannedTensor* tensor : wanted.reads) task.instance.inputs.push_back(operand_of(*tensor));
    for (const PlannedTensor* tensor : wanted.writes) task.instance.outputs.push_back(operand_of(*tensor));
    if (!named.parameter.empty()) task.name += " " + named.parameter;
    if (wanted.action == ActionKind::launch) {
      task.overwrites = plan_.ops.at(wanted.kind).may_overwrite;
      task.cost = cost_of(plan_.ops.at(wanted.kind), task.instance);
    }
    set_.tasks.push_back(std::move(task));
    return static_cast<std::int32_t>(set_.tasks.size() - 1);
  }

  /// Where its part is, and what brings the parts together or sums them.
  void add_over_ranks(const PlannedTensor& whole) {
    OverRanks& over = set_.over_ranks[whole.offset];
    const PlannedTensor* part = plan_.find({whole.kind, whole.parameter, whole.layer, TensorId::kOwn});
    if (!part && whole.kind == names::kWorking) part = plan_.find({names::kMaster, whole.parameter, whole.layer});
    if (!part) return;
    const ParameterPlan& parameter = plan_.parameter(whole.parameter);
    over.part = places_.tensor(*part);
    over.first = byte_count({part->first}, whole.dtype);
    const std::vector<double> counts = counts_of(whole.extents, parameter.bounds);
    const double most = *std::max_element(counts.begin(), counts.end());
    over.largest = byte_count({static_cast<std::int64_t>(most)}, whole.dtype);
    if (whole.owner != TensorOwner::gradient) {
      over.gather = task_of({"all_gather", {{"counts", counts}}, {part}, {&whole}});
      return;
    }
    over.reduce =
        task_of({"reduce_scatter", {{"reduction", std::string("sum")}, {"counts", counts}}, {&whole}, {part}});
    over.add = task_of({"add", {}, {part, part}, {part}, ActionKind::launch});
  }

  void add_all_reduce(RunSchedule& schedule, const std::vector<const PlannedTensor*>& tensors, const char* reduction,
                      std::int32_t window = -1, Axis axis = Axis::ranks) {
    Collective wanted{"all_reduce", {{"reduction", std::string(reduction)}}, tensors, tensors};
    wanted.axis = axis;
    add_collective(schedule, wanted, window);
  }

  /// Elements of each rank's part of a tensor.
  std::vector<double> counts_of(const Extents& whole, const RowBounds& bounds) const {
    const std::vector<std::int64_t> slabs = slabs_of(whole, bounds, plan_.options.state.ranks);
    return {slabs.begin(), slabs.end()};
  }

  /// Each rank gets its part of a tensor from all, sums them in a tree, and where the tensor is not split all ranks get
  /// the sums.
  void add_tree_sum(RunSchedule& schedule, const PlannedTensor& whole, const RowBounds& bounds) {
    const auto ranks = static_cast<std::size_t>(plan_.options.state.ranks),
               rank = static_cast<std::size_t>(plan_.options.state.rank);
    const std::vector<double> counts = counts_of(whole.extents, bounds);
    std::vector<double> exchanged;
    for (std::size_t from = 0; from < ranks; ++from) exchanged.insert(exchanged.end(), counts.begin(), counts.end());
    const auto own = static_cast<std::int64_t>(counts[rank]);
    const double first = std::accumulate(counts.begin(), counts.begin() + static_cast<std::ptrdiff_t>(rank), 0.0);
    PlannedTensor staged = plan_.tensor({names::kStaged});
    staged.dtype = whole.dtype;
    staged.extents = {static_cast<std::int64_t>(ranks), own};
    const PlannedTensor part = whole.part_at({{own}, static_cast<std::int64_t>(first)});
    add_collective(schedule, {"all_to_all", {{"counts", exchanged}}, {&whole}, {&staged}});
    if (own > 0)
      add_collective(schedule,
                     {"reduce_ranks", {{"reduction", std::string("tree")}}, {&staged}, {&part}, ActionKind::launch});
    if (bounds.empty()) add_collective(schedule, {"all_gather", {{"counts", counts}}, {&part}, {&whole}});
  }

  bool is_matrix(const ParameterPlan& parameter) const { return parameter.spec.extents.size() > 1; }

  void add_gathers(RunSchedule& schedule, const ParameterPlan& parameter, int layer) {
    if (parameter.shards_weights) return;  // for each use
    for (const Value& value : plan_.forms_of(parameter, layer).gathered) {
      TensorId id = working_id(parameter.spec.name, value.name, layer);
      const PlannedTensor& whole = plan_.tensor(id);
      id.part = TensorId::kOwn;
      const PlannedTensor own = plan_.part(id);
      add_collective(schedule,
                     {"all_gather", {{"counts", counts_of(whole.extents, parameter.bounds)}}, {&own}, {&whole}});
    }
  }

  void add_reduction(RunSchedule& schedule, const ParameterPlan& parameter, int layer) {
    const PlannedTensor& whole = plan_.tensor({names::kGradient, parameter.spec.name, layer});
    if (in_tree()) return add_tree_sum(schedule, whole, parameter.bounds);
    if (parameter.bounds.empty()) return add_all_reduce(schedule, {&whole}, "sum");
    const PlannedTensor own = plan_.part({names::kGradient, parameter.spec.name, layer, TensorId::kOwn});
    add_collective(schedule,
                   {"reduce_scatter",
                    {{"reduction", std::string("sum")}, {"counts", counts_of(whole.extents, parameter.bounds)}},
                    {&whole},
                    {&own}});
  }

  void add_squares_gather(RunSchedule& schedule) {
    const PlannedTensor* own = plan_.find({names::kOwnSquares});
    if (!own) return;
    const std::vector<double> counts(static_cast<std::size_t>(plan_.options.state.ranks),
                                     static_cast<double>(element_count(own->extents)));
    add_collective(schedule, {"all_gather", {{"counts", counts}}, {own}, {&plan_.tensor({names::kShardSquares})}});
  }

  std::vector<const PlannedTensor*> tensors_that(const std::function<bool(const PlannedTensor&)>& takes) const {
    std::vector<const PlannedTensor*> tensors;
    for (const PlannedTensor& tensor : plan_.tensors)
      if (takes(tensor)) tensors.push_back(&tensor);
    return tensors;
  }

  /// Those that ranks agree on behind an update window's programs: neighbours, as the windows' parameters are.
  PlannedTensor amaxes_of(const UpdateWindow& window) const {
    PlannedTensor amaxes = plan_.tensor({names::kAmax, plan_.parameters[window.agrees[0]].spec.name, window.layer});
    amaxes.extents = {static_cast<std::int64_t>(window.agrees.size())};
    return amaxes;
  }

  void add_meeting(const Run& run, const Stop& stop) {
    RunSchedule& schedule = set_[run];
    auto each = [&](auto add) {
      for (const ParameterPlan& parameter : plan_.parameters)
        if (parameter.spec.group == stop.group) add(parameter);
    };
    switch (stop.meeting) {
      case Meeting::none: return;
      case Meeting::gather:
        return each([&](const ParameterPlan& parameter) { add_gathers(schedule, parameter, stop.layer); });
      case Meeting::reduce:
        return each([&](const ParameterPlan& parameter) {
          if (!parameter.spec.trainable) return;
          if ((is_matrix(parameter) && !parameter.shards_gradient) || in_tree())
            add_reduction(schedule, parameter, stop.layer);
        });
      case Meeting::sum:
        if (in_tree()) {
          add_tree_sum(schedule, plan_.tensor({names::kLossStats}), {});
          break;
        }
        add_all_reduce(schedule, tensors_that([&](const PlannedTensor& tensor) {
                         return tensor.owner == TensorOwner::gradient && !is_matrix(plan_.parameter(tensor.parameter));
                       }),
                       "sum");
        break;
      case Meeting::sum_norms:
        if (in_tree()) {
          add_squares_gather(schedule);
          break;
        }
        for (const Axis axis : {Axis::ranks, Axis::machine})
          add_all_reduce(schedule, tensors_that([&](const PlannedTensor& tensor) {
                           const bool shards = tensor.kind == names::kShardSquares && tensor.part_of < 0;
                           return shards ? axis == shards_axis()
                                         : axis == Axis::ranks && (tensor.kind == names::kLossStats ||
                                                                   tensor.owner == TensorOwner::statistic);
                         }),
                         "sum", -1, axis);
        break;
      case Meeting::amaxes:
        if (stop.update) {
          const PlannedTensor amaxes = amaxes_of(*stop.update);
          add_all_reduce(schedule, {&amaxes}, "maximum", stop.window);
          break;
        }
        [[fallthrough]];
      case Meeting::states:
        add_all_reduce(schedule, tensors_that([&](const PlannedTensor& tensor) {
                         return (tensor.kind == names::kAmaxes && stop.meeting == Meeting::amaxes) ||
                                tensor.owner == TensorOwner::precision;
                       }),
                       "maximum");
        break;
    }
  }

  // Loss and update state come to the host, which waits for them.
  void add_result() {
    RunSchedule& schedule = set_[Run::result];
    std::vector<Access> read;
    std::int64_t offset = 0;
    for (const char* name : {names::kLossStats, names::kUpdate}) {
      const PlannedTensor& tensor = plan_.tensor({name});
      read.push_back({{Space::results, 0, offset, tensor.bytes()}, add_value(std::string("read ") + name)});
      add_copy(schedule, places_.tensor(tensor), read.back());
      offset += tensor.bytes();
    }
    schedule.add({.kind = ActionKind::host, .lane = Lane::host}, read, {});
  }

  const Plan& plan_;
  const Programs programs_;
  ScheduleSet set_;
  Places places_;
  std::set<std::tuple<const PlacedProgram*, Stop::Flow, int>> without_slots_;  // by layer; of Programs::in_slots
  std::map<const PlacedProgram*, Known> known_;
  std::vector<Access> reads_, writes_;  // of the action being added
};

}  // namespace

ScheduleSet make_schedules(const Plan& plan) {
  return make_schedules(plan, [](const Run&) { return true; });
}

ScheduleSet make_schedules(const Plan& plan, const std::function<bool(const Run&)>& wanted) {
  return Maker(plan, Programs::all).make(wanted);
}

// A micro-step that ends a step holds what the others do, and one that applies an update more.
ScheduleSet make_slot_schedules(const Plan& plan) {
  const bool ends = !order_of(plan, Run::last).empty();
  return Maker(plan, Programs::in_slots).make([&](const Run& run) {
    return run.kind != Run::Kind::micro_step || (run.step.last == ends && run.step.first == run.step.updates);
  });
}

}  // namespace quern
