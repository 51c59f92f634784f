#include <algorithm>
#include <iterator>
#include <numeric>
#include <set>
#include <utility>

#include "plan/lay_out.h"
#include "plan/planner.h"
#include "plan/programs/state_programs.h"
#include "plan/programs/update_windows.h"
#include "plan/schedule/make_schedules.h"
#include "plan/schedule/residency.h"
#include "plan/schedule/synchronize.h"
#include "plan/time/estimate.h"
#include "plan/time/simulate.h"
#include "plan/time/step_time.h"
#include "program/names.h"
#include "program/passes/observe.h"
#include "program/passes/op_forms.h"
#include "quern/error.h"
#include "quern/step_state.h"

namespace quern {

namespace {

/// Places programs of a plan, and notes what the device refuses.
class Placer {
 public:
  Placer(const PlanParts& parts, Plan& plan, std::set<std::string>& refusals)
      : parts_(parts), plan_(plan), refusals_(refusals) {}

  /// Places the program of one that is not placed yet.
  PlacedProgram operator()(PlacedProgram wanted) {
    PlacedProgram placed = (*this)(wanted.program);
    placed.tensors = std::move(wanted.tensors);
    placed.own = wanted.own;
    return placed;
  }

  PlacedProgram operator()(const Program& program) {
    const OpForms forms(program, plan_.ops, plan_.options.geometry);
    auto workspace = [&](const Op& op) { return workspace_of(forms.of(op)); };
    return place(program, plan_.ops, plan_.options.geometry, plan_.alignment, workspace, program.outputs);
  }

  LayerClass operator()(const Stage& stage) {
    LayerClass layer{.name = stage.name, .evaluate = (*this)(stage.evaluate)};
    if (!plan_.options.train) return layer;
    layer.forward = (*this)(stage.forward);
    layer.backward = (*this)(stage.backward);
    layer.advance = (*this)(StatePrograms::advance({&stage}));
    for (const std::string& name : stage.split.saved)
      layer.saved.push_back(stage.split.forward[stage.split.forward.find(name)]);
    return layer;
  }

 private:
  // The most that any form of the op needs.
  std::int64_t workspace_of(const std::vector<OpInstance>& forms) {
    std::int64_t bytes = 0;
    for (const OpInstance& form : forms) {
      if (form.kind == kAllReduce) {
        check_sum_over_ranks(form);
        continue;
      }
      OpSupport support = parts_.device.query(form);
      if (!support.refusal.empty()) refusals_.insert(form.kind + ": " + support.refusal);
      bytes = std::max(bytes, static_cast<std::int64_t>(support.workspace_bytes));
      if (!support.concurrent) plan_.exclusive.insert(form.kind);
    }
    return bytes;
  }

  void check_sum_over_ranks(const OpInstance& op) {
    auto need = [&](bool holds, const char* what) {
      if (!holds) refusals_.insert(op.kind + ": " + what);
    };
    const Operand &x = op.inputs[0], &y = op.outputs[0];
    need(plan_.options.state.meet, "there is one rank");
    need(plan_.options.state.in_tree == 0, "its sums depend on the number of ranks; set parallel.reduction = \"fast\"");
    need(!plan_.options.uneven,
         "some ranks would have more micro-batches to sum than others; set train.accumulation to a multiple of "
         "parallel.ranks");
    need(!y.accumulate, "its result would add up over micro-batches, which it does not");
    need(x.dtype == y.dtype && x.extents == y.extents, "its result has the operand's shape and dtype");
    need(x.dtype == DType::f32 || x.dtype == DType::bf16, "ranks sum f32 and bf16");
  }

  const PlanParts& parts_;
  Plan& plan_;
  std::set<std::string>& refusals_;
};

class Planner {
 public:
  Planner(const PlanParts& parts, const PlanOptions& options, const ChosenPrograms& programs)
      : parts_(parts),
        plan_(programs.plan),
        set_(programs.set),
        state_(parts, set_, plan_),
        refusals_(programs.refusals),
        placed_(parts, plan_, refusals_) {
    plan_.options = options;
  }

  Plan make(const std::function<bool(const Plan&)>& worth_slots) {
    if (plan_.options.state.in_tree > 0) check_tree();
    make_parameters();
    const auto own = static_cast<std::int64_t>(parts_.device.traits().own_bytes);
    plan_.beside_bytes = checked_sum(own, parts_.communicator_bytes);
    lay_out(plan_, parts_, tensors_, worth_slots);
    plan_.owners.push_back({"device's own", MemoryKind::device, own});
    plan_.owners.push_back({"communicators", MemoryKind::device, parts_.communicator_bytes});
    report_refusals();
    return std::move(plan_);
  }

 private:
  // ---- parameters and the optimizer ----

  void make_parameters() {
    for (const ParameterSpec& spec : set_.parameters()) {
      std::vector<Program> refreshes;
      std::vector<bool> reads;  // the master
      auto add = [&](const std::vector<const Stage*>& stages) {
        refreshes.push_back(state_.refresh(spec, stages));
        reads.push_back(state_.reads_master(spec, stages));
      };
      if (spec.group == ParameterGroup::block)
        for (const Stage& stage : set_.classes) add({&stage});
      else
        add({&set_.embed, &set_.head});
      ParameterPlan parameter = planned_parameter(spec, refreshes, reads);
      whole_refreshes_.push_back(std::move(refreshes));
      plan_.parameter_count = checked_sum(
          plan_.parameter_count, checked_product(spec.count(), spec.group == ParameterGroup::block ? layers() : 1));
      plan_.parameters.push_back(std::move(parameter));
    }
    check_shards();
    check_quantized_masters();
    // As update windows come, so that a window's amaxes are neighbours.
    std::stable_sort(tensors_.scaled.begin(), tensors_.scaled.end(), [](const ScaledMaster& a, const ScaledMaster& b) {
      return std::pair(a.spec.group, a.layer) < std::pair(b.spec.group, b.layer);
    });
    if (!plan_.options.train) return;
    const StatePlacement& state = plan_.options.state;
    const bool gradients = state.gradients.memory != kOnDevice;
    const bool windows = in_slots(state.gradients) || in_slots(state.master) || in_slots(state.moments);
    plan_.updates = windows ? split_update(plan_, whole_refreshes_) : one_update(plan_);
    const char* step = plan_.defers_update() ? names::kUpdateStep : names::kStep;
    for (UpdateWindow& window : plan_.updates) {
      window.program = placed_(state_.update(window.parts, step));
      window.exchange = placed_(state_.exchange(window.parts));
      for (PlacedProgram& program : window.follow) program = placed_(std::move(program));
    }
    const bool in_tree = state.in_tree > 0, by_shards = state.shards() || in_tree;
    for (int layer = -1; layer < layers() && gradients; ++layer)
      plan_.squares.push_back(placed_(by_shards ? state_.shard_squares(layer) : state_.squares(layer)));
    if (by_shards && !gradients) plan_.squares.push_back(placed_(state_.squares(StatePrograms::Split::shards)));
    if (by_shards) plan_.squares.push_back(placed_(state_.squares(StatePrograms::Split::whole)));
    plan_.norm = plan_.squares.empty() ? placed_(state_.norm()) : placed_(state_.norm_of_squares(plan_.squares));
    plan_.amaxes = placed_(state_.amaxes(tensors_.scaled));
    for (const auto group : {ParameterGroup::embedding, ParameterGroup::block, ParameterGroup::head})
      if (in_tree) plan_.trees.push_back(placed_(state_.sum_tree(group)));
  }

  /// Whether what the update takes comes and goes, beside which other kernels could run.
  bool in_slots(const Placement& placement) const {
    const OffloadTraits* store = parts_.store(placement.memory);
    return placement.memory != kOnDevice && !(store && store->mappable);
  }

  // Parameters that are split have refreshes in two parts, around the gathering of copies, or where these need all rows
  // at once of the master.
  // Of a frozen one only what ops read is split, where ranks gather that for each use.
  ParameterPlan planned_parameter(const ParameterSpec& spec, const std::vector<Program>& refreshes,
                                  const std::vector<bool>& reads) {
    ParameterPlan parameter{.spec = spec, .master = state_.master_dtype(spec)};
    if (spec.trainable) parameter.update = update_traits(parts_.optimizer, spec, set_.ops());
    parameter.quantized = state_.quantized_master(spec);
    if (!parameter.quantized.empty())
      parameter.update.locality = std::max(parameter.update.locality, UpdateLocality::row);
    check_evaluated(parameter);
    std::int64_t groups = 1;
    bool whole = false, has_both = false;
    for (std::size_t i = 0; i < refreshes.size(); ++i) {
      const std::int64_t own = row_groups_of(refreshes[i], plan_.ops);
      whole = whole || own == 0;
      has_both = has_both || (reads[i] && !refreshes[i].ops.empty());
      groups = std::lcm(groups, std::max<std::int64_t>(own, 1));
    }
    const bool reads_master = std::find(reads.begin(), reads.end(), true) != reads.end();
    const StatePlacement& state = plan_.options.state;
    const bool splits_frozen = state.weights.sharding == Sharding::ranks && !whole && !has_both;
    if (spec.trainable ? parameter.update.splits() : splits_frozen) {
      Cuts cuts = cuts_of(state, spec, std::lcm(groups, aligned_rows(spec, parameter.update.states, plan_.alignment)));
      parameter.bounds = std::move(cuts.shards);
      parameter.pieces = std::move(cuts.pieces);
    }
    parameter.shards_weights = !parameter.bounds.empty() && !whole && state.weights.sharding == Sharding::ranks;
    parameter.shards_gradient =
        spec.trainable && !parameter.bounds.empty() && state.gradients.sharding == Sharding::ranks;
    if (!parameter.shards_weights && (reads_master || (whole && !parameter.bounds.empty())))
      tensors_.whole_masters.insert(spec.name);
    std::vector<std::vector<Value>>& copies = tensors_.copies[spec.name];
    std::vector<std::string> formats;
    for (const Program& refresh : refreshes) {
      SplitRefresh split{.own = refresh, .rest = {}};
      const bool splits = !parameter.bounds.empty() && row_groups_of(refresh, plan_.ops) > 0;
      if (splits) {
        split = split_refresh(refresh, plan_.ops, parameter.bounds, plan_.options.state.rank);
      } else {
        std::copy_if(refresh.values.begin(), refresh.values.end(), std::back_inserter(split.made),
                     [](const Value& value) { return value.role == Role::parameter; });
        if (!parameter.bounds.empty()) std::swap(split.own, split.rest);
      }
      ParameterForms& forms = parameter.forms.emplace_back();
      forms.loads = !spec.trainable && !reads[parameter.forms.size() - 1];
      forms.refresh = placed_({.program = split.own, .own = true});
      if (plan_.options.train && plan_.options.observe && spec.trainable)
        forms.observe = placed_({.program = observe_copies(split.own.ops.empty() ? split.rest : split.own, plan_.ops),
                                 .own = !split.own.ops.empty()});
      forms.rest = placed_(split.rest);
      if (!split.amax_format.empty())
        forms.amax = placed_({.program = StatePrograms::amax_of(forms.loads ? refresh.values[0] : split.own.values[0],
                                                                names::kAmax, split.amax_format),
                              .own = !forms.loads});
      if (!parameter.bounds.empty() && tensors_.whole_masters.contains(spec.name))
        split.gathered.push_back({.name = names::kMaster,
                                  .shape = Shape(spec.extents.begin(), spec.extents.end()),
                                  .dtype = parameter.master,
                                  .role = Role::state,
                                  .parameter = spec.name});
      forms.gathered = std::move(split.gathered);
      copies.push_back(std::move(split.made));
      formats.push_back(std::move(split.amax_format));
    }
    for_each_layer(spec, layers(), [&](int layer) {
      const std::string& format = formats[plan_.class_index(layer)];
      if (!format.empty() && !plan_.forms_of(parameter, layer).loads) tensors_.scaled.push_back({spec, layer, format});
    });
    return parameter;
  }

  // ---- memory ----

  int layers() const { return static_cast<int>(plan_.model.layers); }

  // ---- refusals ----

  void check_shards() const {
    const auto& all = plan_.parameters;
    if (std::any_of(all.begin(), all.end(), [](const ParameterPlan& p) { return !p.bounds.empty(); })) return;
    if (const std::string whole = plan_.whole_on_ranks(); !whole.empty())
      throw Error(ErrorCode::config, {.where = "parallel.shard_optimizer",
                                      .what = "ranks shard rows, and each would have the whole of " + whole,
                                      .found = "\"ranks\"",
                                      .expected = "\"none\", or an optimizer that updates elements or rows",
                                      .next = "set it to \"none\", and memory.moments to a store if memory is short"});
  }

  void check_quantized_masters() const {
    if (plan_.options.masters) return;
    auto refuse = [](const char* what, const std::string& found, const char* expected, const char* next) {
      throw Error(ErrorCode::config,
                  {.where = "optimizer.master", .what = what, .found = found, .expected = expected, .next = next});
    };
    const auto& all = plan_.parameters;
    if (std::all_of(all.begin(), all.end(), [](const ParameterPlan& p) { return p.quantized.empty(); }))
      refuse("no weight is read in int8 alone", "\"none\"", "a precision that does so",
             "keep masters, or train all weights with precision.id = \"low_bit\" and weights = \"int8\"");
    const StatePlacement& state = plan_.options.state;
    if (state.master.memory != kOnDevice)
      refuse("weights without masters stay on the device", "memory.master = \"" + text_of(state.master) + "\"",
             "\"device\"", "set memory.master to it");
    for (const ParameterPlan& parameter : all)
      if (!parameter.quantized.empty() && !parameter.bounds.empty())
        refuse("ranks do not shard weights without masters", "parallel.shard_optimizer = \"ranks\"", "\"none\"",
               "set it to \"none\", or keep masters");
  }

  static void check_evaluated(const ParameterPlan& parameter) {
    auto word = [](DType dtype) {
      return dtype == DType::f32 ? "\"fp32\"" : "\"" + std::string(name_of(dtype)) + "\"";
    };
    for (const OptimizerState& state : parameter.update.states)
      if (state.evaluated && state.dtype != parameter.master)
        throw Error(ErrorCode::config,
                    {.where = "optimizer.master",
                     .what = "evaluations use the optimizer's state \"" + state.name + "\" in place of the masters",
                     .found = word(parameter.master),
                     .expected = word(state.dtype) + ", which that state has",
                     .next = "set optimizer.master to it"});
  }

  void check_tree() const {
    auto refuse = [](const char* key, const char* what, const char* next) {
      throw Error(ErrorCode::config, {.where = key, .what = what, .next = next});
    };
    if (plan_.options.gradient != DType::f32)
      refuse("optimizer.gradient", "reproducible sums of gradients need fp32",
             "set it to \"fp32\", or parallel.reduction = \"fast\"");
    auto advances = [](const Stage& stage) {
      return std::any_of(stage.lowered.joint.program.states.begin(), stage.lowered.joint.program.states.end(),
                         [](const StateSpec& state) { return !state.advance.empty(); });
    };
    if (advances(set_.embed) || advances(set_.head) || std::any_of(set_.classes.begin(), set_.classes.end(), advances))
      refuse("parallel.reduction",
             "delayed scales and states of the model depend on the rank's micro-batches, so sums would differ from "
             "another number of ranks",
             "set activation_scaling and gradient_scaling of the precision to \"current\", \"row\", \"block\" or "
             "\"square\"");
  }

  void report_refusals() const {
    if (refusals_.empty()) return;
    std::string list;
    for (const std::string& refusal : refusals_) list += "\n  " + refusal;
    throw Error(ErrorCode::resources,
                {.where = "device " + parts_.device.traits().id,
                 .what = "cannot run this model:" + list,
                 .next = plan_.options.documents ? "choose another device, precision or model, or data.documents = "
                                                   "\"joined\" if it refuses attention"
                                                 : "choose another device, precision or model"});
  }

  const PlanParts& parts_;
  Plan plan_;
  const ProgramSet& set_;
  StatePrograms state_;
  PlannedTensors tensors_;
  std::vector<std::vector<Program>> whole_refreshes_;  // by parameter and layer class, of all rows
  std::set<std::string> refusals_;
  Placer placed_;
};

void add_schedules(Plan& plan, const Device& device, const std::function<bool(const Run&)>& wanted) {
  const DeviceTraits& traits = device.traits();
  plan.schedules = make_schedules(plan, wanted);
  make_resident(plan.schedules, plan.ring, plan.alignment);
  synchronize(plan.schedules);
  for (Task& task : plan.schedules.tasks) {
    const OpSupport support = device.query(task.instance);
    task.seconds = launch_seconds(support, task.cost, traits);
    task.slow = support.slow;
    task.fast_seconds = support.fast_seconds;
  }
  const RunSchedule& micro_step = plan.schedules[plan.options.train ? Run::later : Run::evaluate];
  plan.seconds_per_micro_step = simulated_seconds(plan.schedules, micro_step, traits);
  if (plan.options.train) plan.seconds_per_step = simulated_step(plan, traits, plan.options.accumulation).total;
  double flops = 0;
  for (const Action& action : micro_step.actions) {
    if (action.kind != ActionKind::launch) continue;
    const Task& task = plan.schedules.task_of(action);
    if (task.cost.tensor_core && task.phase != Phase::recompute) flops += task.cost.flops;
  }
  plan.flops_per_token = flops / static_cast<double>(plan.options.geometry.tokens());
}

/// Whether an estimate is of that run.
bool is_timed(const Plan& plan, const Run& run) {
  if (!plan.options.train || run.kind != Run::Kind::micro_step)
    return run == (plan.options.train ? Run::update : Run::evaluate);
  const MicroStep& step = run.step;
  if (step.observed || step.updates != (step.first && plan.defers_update())) return false;
  return run == Run::later || (plan.options.accumulation == 1 ? step.first : !(step.first && step.last));
}

}  // namespace

ChosenPrograms::ChosenPrograms(const PlanParts& parts, const PlanOptions& options, const ProgramSet& lowered,
                               const RecomputeChoice& choice)
    : set(lowered) {
  set.finish(choice);
  plan.options = options;
  plan.alignment = static_cast<std::int64_t>(parts.device.traits().alignment);
  plan.model = parts.model.traits();
  plan.uploaded = set.inputs();
  plan.uploaded.push_back({.name = names::kStep,
                           .shape = {std::int64_t{sizeof(StepState) / 4}},
                           .dtype = DType::u32,
                           .role = Role::runtime});
  plan.model_states = set.states();
  plan.ops = set.ops();
  Placer placed(parts, plan, refusals);
  plan.embed = placed(options.train ? set.embed.forward : set.embed.evaluate);
  plan.head_evaluate = placed(set.head.evaluate);
  if (options.logits) plan.head_logits = placed(set.logits);
  if (options.next_logits) plan.head_next = placed(set.next_logits);
  for (const Stage& stage : set.classes) plan.classes.push_back(placed(stage));
  plan.class_of_layer = set.layer_classes(choice).of_layer;
  if (!options.train) return;
  plan.embed_backward = placed(set.embed.backward);
  plan.head_train = placed(set.head.forward);
  plan.head_advance = placed(StatePrograms::advance({&set.embed, &set.head}));
}

Plan plan_with(const PlanParts& parts, const PlanOptions& options, const ChosenPrograms& programs,
               const std::function<bool(const Plan&)>& worth_slots) {
  return Planner(parts, options, programs).make(worth_slots);
}

void add_schedules(Plan& plan, const Device& device) {
  add_schedules(plan, device, [](const Run&) { return true; });
}

void add_estimates(Plan& plan, const Device& device) {
  add_schedules(plan, device, [&](const Run& run) { return is_timed(plan, run); });
  plan.schedules = {};
}

}  // namespace quern
