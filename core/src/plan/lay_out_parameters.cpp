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
  ParameterLayout(Plan& plan, const PlanParts& parts, const ProgramSet& set, const Shards& shards,
                  const PlannedTensors& tensors)
      : Reserve(plan, parts), set_(set), shards_(shards), tensors_(tensors) {}

  void run() {
    for_each_parameter([&](const ParameterPlan& parameter, int layer) {  // a frozen one is among the compute weights
      if (plan_.forms_of(parameter, layer).loads) return;
      add_shard(parameter.spec.trainable ? TensorOwner::master : TensorOwner::working, names::kMaster, parameter.spec,
                layer, parameter.master, parameter.spec.extents);
      if (!parameter.quantized.empty()) lay_out_quantized(parameter, layer);
    });
    for_each_parameter([&](const ParameterPlan& parameter, int layer) { lay_out_working(parameter, layer); });
    if (!plan_.options.train) return;
    for_each_trained([&](const ParameterSpec& spec, int layer) {
      const ParameterPlan& parameter = plan_.parameter(spec.name);
      const DType dtype = plan_.options.gradient;
      if (!parameter.shards_gradient) return add_whole_gradient(spec, layer);
      add_over_ranks(TensorOwner::gradient, names::kGradient, spec.name, layer, dtype, spec.extents);
      add_part(TensorOwner::gradient, names::kGradient, parameter, layer, dtype, spec.extents);
    });
    lay_out_states();
    if (plan_.options.state.in_tree > 0) lay_out_tree();
    for (const PlannedTensor& tensor : plan_.tensors) {
      if (tensor.owner == TensorOwner::working || tensor.parameter.empty() || tensor.kind == names::kPartials ||
          tensor.over_ranks)
        continue;
      PlannedTensor alias = tensor;
      if (const ParameterPlan& parameter = plan_.parameter(tensor.parameter);
          !parameter.bounds.empty() && tensor.extents == parameter.spec.extents) {
        const Shard shard = shards_.of(parameter.spec);
        alias = part_of(tensor, shard);
        alias.whole = tensor.extents;
        alias.first = shard.first;
      }
      alias.kind = tensor_name(whole_name(tensor.kind), tensor.parameter, tensor.layer);
      alias.parameter.clear();
      alias.layer = -1;
      plan_.add_alias(std::move(alias));
    }
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
      if (parameter.spec.trainable) visit(parameter.spec, layer);
    });
  }

  /// Kind by kind: neighbours in memory are of one kind.
  void lay_out_states() {
    std::vector<std::string> kinds;
    for (const ParameterPlan& parameter : plan_.parameters)
      for (const OptimizerState& state : parameter.update.states)
        if (std::find(kinds.begin(), kinds.end(), state.name) == kinds.end()) kinds.push_back(state.name);
    for (const std::string& kind : kinds)
      for_each_trained([&](const ParameterSpec& spec, int layer) {
        for (const OptimizerState& state : plan_.parameter(spec.name).update.states)
          if (state.name == kind) add_shard(TensorOwner::optimizer, kind, spec, layer, state.dtype, state.extents);
      });
  }

  /// Of a parameter's tensor this rank's shard, where it is split. A master that is read as it is stays whole, on the
  /// device where it is gathered.
  void add_shard(TensorOwner owner, const std::string& kind, const ParameterSpec& spec, int layer, DType dtype,
                 const Extents& whole) {
    if (owner == TensorOwner::master && tensors_.whole_masters.contains(spec.name)) {
      PlannedTensor tensor{.owner = owner,
                           .kind = kind,
                           .parameter = spec.name,
                           .layer = layer,
                           .dtype = dtype,
                           .extents = spec.extents};
      const std::int64_t bytes = tensor.bytes();
      return add_tensor(std::move(tensor), bytes, shards_.has(spec.name) ? TensorOwner::input : owner);
    }
    const Shard shard = shards_.of(spec.name, whole);
    PlannedTensor tensor{
        .owner = owner, .kind = kind, .parameter = spec.name, .layer = layer, .dtype = dtype, .extents = shard.extents};
    if (shard.extents != whole) tensor.whole = whole;
    tensor.first = shard.first;
    const std::int64_t most = byte_count(shards_.largest(spec.name, whole), dtype);
    add_tensor(std::move(tensor), most);  // so that all ranks' arenas are alike
  }

  /// Scales beside a master in int8; and both under the names by which ops read them.
  void lay_out_quantized(const ParameterPlan& parameter, int layer) {
    const std::string& name = parameter.spec.name;
    add_tensor(TensorOwner::master, names::kMasterScale, name, layer, DType::f32, {parameter.spec.extents[0]});
    for (std::size_t i : {0, 1}) {
      PlannedTensor alias = plan_.tensor(i == 0 ? names::kMaster : names::kMasterScale, name, layer);
      alias.kind = parameter.quantized[i].name;
      alias.owner = TensorOwner::working;
      plan_.add(std::move(alias));
    }
  }

  /// This rank's rows, with room for any rank's.
  void add_part(TensorOwner owner, const std::string& whole_kind, const ParameterPlan& parameter, int layer,
                DType dtype, const Extents& whole) {
    auto shard = [&](int rank) { return shard_of_rows(whole, parameter.bounds, rank); };
    const Shard own = shard(plan_.options.state.rank);
    std::int64_t most = 0;
    for (int rank = 0; rank < plan_.options.state.ranks; ++rank)
      most = std::max(most, byte_count(shard(rank).extents, dtype));
    PlannedTensor part{owner, shard_name(whole_kind), parameter.spec.name, layer, dtype, own.extents};
    part.whole = whole;
    part.first = own.first;
    add_tensor(std::move(part), most);
  }

  /// On the device if ranks have to reach it there.
  void add_whole_gradient(const ParameterSpec& spec, int layer) {
    PlannedTensor tensor{.owner = TensorOwner::gradient,
                         .kind = names::kGradient,
                         .parameter = spec.name,
                         .layer = layer,
                         .dtype = plan_.options.gradient,
                         .extents = spec.extents};
    const std::int64_t bytes = tensor.bytes();
    add_tensor(std::move(tensor), bytes, plan_.options.state.meet ? TensorOwner::input : TensorOwner::gradient);
  }

  /// Partial sums, pieces of gradients, and memory for what all ranks have of one gradient.
  void lay_out_tree() {
    const StatePlacement& state = plan_.options.state;
    const std::int64_t levels = std::bit_width(static_cast<std::uint64_t>(block_of(state))) - 1;
    std::int64_t staged = 2 * (4 + state.ranks);  // f32 for a rank's part of LossStats from all
    for_each_trained([&](const ParameterSpec& spec, int layer) {
      if (levels > 0)
        add_tensor(TensorOwner::gradient, names::kPartials, spec.name, layer, DType::f32, {levels, spec.count()});
      const PlannedTensor& gradient = plan_.tensor(names::kGradient, spec.name, layer);
      const RowBounds& pieces = shards_.pieces(spec.name);
      for (int piece = 0; !pieces.empty() && piece < kPieces; ++piece) {
        PlannedTensor alias = part_of(gradient, shard_of_rows(spec.extents, pieces, piece));
        alias.kind = piece_name(spec.name, layer, piece);
        alias.parameter.clear();
        alias.layer = -1;
        plan_.add_alias(std::move(alias));
      }
      const std::vector<std::int64_t> slabs = slabs_of(spec.extents, shards_.bounds(spec.name), state.ranks);
      staged = std::max(staged, *std::max_element(slabs.begin(), slabs.end()) * state.ranks);
    });
    if (levels > 0)
      add_tensor(TensorOwner::gradient, std::string(names::kLossStats) + " " + names::kPartials, "", -1, DType::f64,
                 {levels, 4});
    if (state.meet) add_tensor(TensorOwner::gradient, names::kStaged, "", -1, DType::f32, {staged});
  }

  void lay_out_working(const ParameterPlan& parameter, int layer) {
    if (parameter.shards_weights) return lay_out_sharded_working(parameter, layer);
    bool copied = false;
    const std::size_t index = plan_.class_index(layer);
    for (const Value& value : tensors_.copies.at(parameter.spec.name)[index]) {
      bool plain = value.name == parameter.spec.name;
      copied = copied || plain;
      add_tensor(TensorOwner::working, plain ? names::kWorking : value.name, parameter.spec.name, layer, value.dtype,
                 fixed_extents(value.shape));
    }
    if (parameter.bounds.empty()) return add_master_as_working(parameter, layer, copied);
    add_master_part(parameter, layer);
    add_master_as_working(parameter, layer, copied);
    for (const Value& value : parameter.forms[index].gathered) {
      if (value.name == names::kMaster) continue;  // whose part there is
      const PlannedTensor& whole = plan_.working(parameter.spec, value.name, layer);
      PlannedTensor part = part_of(whole, shard_of_rows(whole.extents, parameter.bounds, plan_.options.state.rank));
      part.kind = shard_name(value.name);
      plan_.add(std::move(part));
    }
  }

  /// Under the name by which programs of rows read it.
  void add_master_part(const ParameterPlan& parameter, int layer) {
    PlannedTensor master = plan_.tensor(names::kMaster, parameter.spec.name, layer);
    master = master.whole.empty() ? part_of(master, shards_.of(parameter.spec)) : part_of(master, {master.extents, 0});
    master.kind = shard_name(names::kMaster);
    master.owner = TensorOwner::working;
    plan_.add(std::move(master));
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
      const bool plain = value.name == name;
      copied = copied || plain;
      const std::string kind = plain ? names::kWorking : value.name;
      const Extents extents = fixed_extents(value.shape);
      if (gathered(value.name))
        add_part(TensorOwner::working, value.name, parameter, layer, value.dtype, extents);
      else if (forms.rest.program.find(value.name) == kNoValue) {
        add_tensor(TensorOwner::working, kind, name, layer, value.dtype, extents);  // a scale
        continue;
      }
      add_over_ranks(TensorOwner::working, kind, name, layer, value.dtype, extents);
    }
    if (forms.loads) return;
    add_master_part(parameter, layer);
    if (!copied && parts_.precision.traits().working == parameter.master)
      add_over_ranks(TensorOwner::working, names::kWorking, name, layer, parameter.master, parameter.spec.extents);
  }

  void add_master_as_working(const ParameterPlan& parameter, int layer, bool copied) {
    if (copied || parts_.precision.traits().working != parameter.master) return;
    if (plan_.forms_of(parameter, layer).loads) return;
    PlannedTensor alias = plan_.tensor(names::kMaster, parameter.spec.name, layer);  // the master itself is read
    if (!alias.whole.empty()) return;                                                // not a shard of it
    alias.kind = names::kWorking;
    alias.owner = TensorOwner::working;
    plan_.add(std::move(alias));
  }

  const ProgramSet& set_;
  const Shards& shards_;
  const PlannedTensors& tensors_;
};

}  // namespace

void lay_out_parameters(Plan& plan, const PlanParts& parts, const ProgramSet& set, const Shards& shards,
                        const PlannedTensors& tensors) {
  ParameterLayout(plan, parts, set, shards, tensors).run();
}

}  // namespace quern
