#include "plan/schedule/make_schedules.h"

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "plan/schedule/collectives.h"
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
      if (tensor.over_ranks) add_over_ranks(plan_, set_, places_, tensor);
    for (const Run& run : all_runs()) {
      if (!wanted(run)) continue;
      std::vector<bool> has_sum;
      std::vector<Stop> order = order_of(plan_, run);
      places_.begin(run_memory(plan_, order));
      for (const Stop& stop : order) {
        if (stop.program) add_program(run, stop, has_sum);
        if (stop.loads) add_load(set_[run], stop);
        if (stop.flow == Stop::Flow::forward) put_streams(set_[run], stop);
        add_collectives(plan_, set_, places_, set_[run], stop);
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
      if (tensor.is_training_state() || tensor.kind == names::kRows || tensor.kind == names::kMaster ||
          tensor.kind == names::kPartials)
        set_.held.push_back(access);
    }
    set_.lasting.resize(set_.values.size(), false);
    return std::move(set_);
  }

 private:
  // What a program runs, by whether it observes.
  struct Reading {
    std::vector<bool> runs, read;
    std::map<std::pair<std::size_t, std::vector<bool>>, std::int32_t> tasks = {};  ///< by op and the outputs it adds to
  };
  struct Known {
    Reading plain, observed;
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
    Reading& reading = observes(run) ? known.observed : known.plain;
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
        const bool alone =
            over_ranks || (plan_.options.state.in_tree > 0 && program[op.outputs[o]].role != Role::observation);
        adds[o] = !(starts_sums(run) || alone) || has;
        has = true;
      }
      auto [it, fresh] = reading.tasks.try_emplace({i, adds}, 0);
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
