#include "plan/schedule/collectives.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "program/names.h"

namespace quern {

namespace {

class Collectives {
 public:
  Collectives(const Plan& plan, ScheduleSet& set, Places& places) : plan_(plan), set_(set), places_(places) {}

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

  void add_collectives(RunSchedule& schedule, const Stop& stop) {
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

 private:
  bool in_tree() const { return plan_.options.state.in_tree > 0; }
  /// Whose shards are the whole.
  Axis shards_axis() const { return plan_.options.state.machines > 1 ? Axis::machine : Axis::ranks; }

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
    std::vector<Access> reads, writes;
    for (const PlannedTensor* tensor : wanted.reads) reads.push_back(places_.tensor(*tensor));
    for (const PlannedTensor* tensor : wanted.writes) writes.push_back(places_.tensor(*tensor));
    if (wanted.action == ActionKind::launch) writes.push_back({});  // no workspace
    schedule.add({.kind = wanted.action,
                  .lane = Lane::communication,
                  .task = task,
                  .layer = named_by(wanted).layer,
                  .window = window},
                 reads, writes);
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

  const Plan& plan_;
  ScheduleSet& set_;
  Places& places_;
};

}  // namespace

void add_collectives(const Plan& plan, ScheduleSet& set, Places& places, RunSchedule& schedule, const Stop& stop) {
  if (stop.meeting != Meeting::none) Collectives(plan, set, places).add_collectives(schedule, stop);
}

void add_over_ranks(const Plan& plan, ScheduleSet& set, Places& places, const PlannedTensor& whole) {
  Collectives(plan, set, places).add_over_ranks(whole);
}

}  // namespace quern
