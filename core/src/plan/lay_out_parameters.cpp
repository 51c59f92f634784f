// Where masters, working copies, gradients and the optimizer's state are: all of them, or this rank's parts.
#include <algorithm>
#include <bit>
#include <utility>

#include "plan/lay_out.h"
#include "plan/reserve.h"
#include "program/names.h"

namespace quern {

namespace {

class ParameterLayout : Reserve {
 public:
  ParameterLayout(Plan& plan, const PlanParts& parts, const PlannedTensors& tensors)
      : Reserve(plan, parts), tensors_(tensors) {}

  void run() {
    for_each_parameter([&](const ParameterPlan& parameter, int layer) {  // a frozen one is among the compute weights
      if (plan_.forms_of(parameter, layer).loads) return;
      add_shard(parameter, {{names::kMaster, parameter.spec.name, layer},
                            parameter.spec.trainable ? TensorOwner::master : TensorOwner::working,
                            parameter.master,
                            parameter.spec.extents});
      if (!parameter.quantized.empty()) lay_out_quantized(parameter, layer);
    });
    for_each_parameter([&](const ParameterPlan& parameter, int layer) { lay_out_working(parameter, layer); });
    if (!plan_.options.train) return;
    for_each_trained([&](const ParameterPlan& parameter, int layer) {
      const PlannedTensor gradient{{names::kGradient, parameter.spec.name, layer},
                                   TensorOwner::gradient,
                                   plan_.options.gradient,
                                   parameter.spec.extents};
      // On the device if ranks have to reach it there.
      if (!parameter.shards_gradient)
        return add_tensor(gradient, plan_.options.state.meet ? TensorOwner::input : TensorOwner::gradient);
      add_over_ranks(gradient);
      add_part(parameter, gradient);
    });
    lay_out_states();
    if (plan_.options.state.in_tree > 0) lay_out_tree();
  }

 private:
  template <class Visit>
  void for_each_parameter(Visit visit) const {
    for (const ParameterPlan& parameter : plan_.parameters)
      for_each_layer(parameter.spec, layers(), [&](int layer) { visit(parameter, layer); });
  }
  template <class Visit>
  void for_each_trained(Visit visit) const {
    for_each_parameter([&](const ParameterPlan& parameter, int layer) {
      if (parameter.spec.trainable) visit(parameter, layer);
    });
  }

  /// Kind by kind: neighbours in memory are of one kind.
  void lay_out_states() {
    std::vector<std::string> kinds;
    for (const ParameterPlan& parameter : plan_.parameters)
      for (const OptimizerState& state : parameter.update.states)
        if (std::find(kinds.begin(), kinds.end(), state.name) == kinds.end()) kinds.push_back(state.name);
    for (const std::string& kind : kinds)
      for_each_trained([&](const ParameterPlan& parameter, int layer) {
        for (const OptimizerState& state : parameter.update.states)
          if (state.name == kind)
            add_shard(parameter,
                      {{kind, parameter.spec.name, layer}, TensorOwner::optimizer, state.dtype, state.extents});
      });
  }

  /// Of a parameter's tensor this rank's shard, where it is split. A master that is read as it is stays whole, on the
  /// device where it is gathered.
  void add_shard(const ParameterPlan& parameter, const PlannedTensor& tensor) {
    const bool splits = !parameter.bounds.empty();
    if (tensor.owner == TensorOwner::master && tensors_.whole_masters.contains(tensor.parameter))
      return add_tensor(tensor, splits ? TensorOwner::input : TensorOwner::master);
    splits ? add_part(parameter, tensor, TensorId::kWhole) : add_tensor(tensor);
  }

  /// Scales beside a master in int8; and both under the names by which ops read them.
  void lay_out_quantized(const ParameterPlan& parameter, int layer) {
    const std::string& name = parameter.spec.name;
    add_tensor({{names::kMasterScale, name, layer}, TensorOwner::master, DType::f32, {parameter.spec.extents[0]}});
    for (std::size_t i : {0, 1}) {
      PlannedTensor alias = plan_.tensor({i == 0 ? names::kMaster : names::kMasterScale, name, layer});
      alias.kind = parameter.quantized[i].name;
      alias.owner = TensorOwner::working;
      plan_.add(std::move(alias));
    }
  }

  /// This rank's rows, with room for any rank's, so that all ranks' arenas are alike; known by `part`.
  void add_part(const ParameterPlan& parameter, PlannedTensor tensor, int part = TensorId::kOwn) {
    auto shard = [&](int rank) { return shard_of_rows(tensor.whole, parameter.bounds, rank); };
    tensor.whole = tensor.extents;
    tensor.part = part;
    std::int64_t most = 0;
    for (int rank = 0; rank < plan_.options.state.ranks; ++rank)
      most = std::max(most, byte_count(shard(rank).extents, tensor.dtype));
    const Shard own = shard(plan_.options.state.rank);
    tensor.extents = own.extents;
    tensor.first = own.first;
    const TensorOwner beside = tensor.owner;
    add_tensor(std::move(tensor), beside, most);
  }

  /// Partial sums, pieces of gradients, and memory for what all ranks have of one gradient.
  void lay_out_tree() {
    const StatePlacement& state = plan_.options.state;
    const std::int64_t levels = std::bit_width(static_cast<std::uint64_t>(block_of(state))) - 1;
    std::int64_t staged = 2 * (4 + state.ranks);  // f32 for a rank's part of LossStats from all
    for_each_trained([&](const ParameterPlan& parameter, int layer) {
      const ParameterSpec& spec = parameter.spec;
      if (levels > 0)
        add_tensor({{names::kPartials, spec.name, layer}, TensorOwner::gradient, DType::f32, {levels, spec.count()}});
      const std::vector<std::int64_t> slabs = slabs_of(spec.extents, parameter.bounds, state.ranks);
      staged = std::max(staged, *std::max_element(slabs.begin(), slabs.end()) * state.ranks);
    });
    if (levels > 0) add_tensor({{names::kPartials}, TensorOwner::gradient, DType::f64, {levels, 4}});
    if (state.meet) add_tensor({{names::kStaged}, TensorOwner::gradient, DType::f32, {staged}});
  }

  void lay_out_working(const ParameterPlan& parameter, int layer) {
    if (parameter.shards_weights) return lay_out_sharded_working(parameter, layer);
    bool copied = false;
    for (const Value& value : tensors_.copies.at(parameter.spec.name)[plan_.class_index(layer)]) {
      copied = copied || value.name == parameter.spec.name;
      add_tensor(working(value, parameter, layer));
    }
    add_master_as_working(parameter, layer, copied);
  }

  static PlannedTensor working(const Value& value, const ParameterPlan& parameter, int layer) {
    return {working_id(parameter.spec.name, value.name, layer), TensorOwner::working, value.dtype,
            fixed_extents(value.shape)};
  }

  /// Rows of what ranks gather; the wholes, and values that `rest` makes of them, are in slots only.
  void lay_out_sharded_working(const ParameterPlan& parameter, int layer) {
    const std::string& name = parameter.spec.name;
    const ParameterForms& forms = plan_.forms_of(parameter, layer);
    auto gathered = [&](const std::string& value) {
      return std::any_of(forms.gathered.begin(), forms.gathered.end(),
                         [&](const Value& known) { return known.name == value; });
    };
    bool copied = false;
    for (const Value& value : tensors_.copies.at(name)[plan_.class_index(layer)]) {
      copied = copied || value.name == name;
      const PlannedTensor whole = working(value, parameter, layer);
      if (gathered(value.name))
        add_part(parameter, whole);
      else if (forms.rest.program.find(value.name) == kNoValue) {
        add_tensor(whole);  // a scale
        continue;
      }
      add_over_ranks(whole);
    }
    if (!forms.loads && !copied && parts_.precision.traits().working == parameter.master)
      add_over_ranks({{names::kWorking, name, layer}, TensorOwner::working, parameter.master, parameter.spec.extents});
  }

  void add_master_as_working(const ParameterPlan& parameter, int layer, bool copied) {
    if (copied || parts_.precision.traits().working != parameter.master) return;
    if (plan_.forms_of(parameter, layer).loads) return;
    PlannedTensor alias = plan_.tensor({names::kMaster, parameter.spec.name, layer});  // the master itself is read
    if (!alias.whole.empty()) return;                                                  // not a shard of it
    alias.kind = names::kWorking;
    alias.owner = TensorOwner::working;
    plan_.add(std::move(alias));
  }

  const PlannedTensors& tensors_;
};

}  // namespace

void lay_out_parameters(Plan& plan, const PlanParts& parts, const PlannedTensors& tensors) {
  ParameterLayout(plan, parts, tensors).run();
}

}  // namespace quern
