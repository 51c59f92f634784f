#include "plan/lay_out.h"

#include <algorithm>
#include <utility>

#include "plan/reserve.h"
#include "plan/schedule/make_schedules.h"
#include "plan/schedule/residency.h"
#include "plan/schedule/run_memory.h"
#include "program/names.h"
#include "quern/step_state.h"

namespace quern {

namespace {

class Layout : Reserve {
 public:
  Layout(Plan& plan, const PlanParts& parts, const PlannedTensors& tensors) : Reserve(plan, parts), tensors_(tensors) {}

  void run(const std::function<bool(const Plan&)>& worth_slots) {
    lay_out_parameters(plan_, parts_, tensors_);
    lay_out_inputs();
    lay_out_results();
    lay_out_states();
    lay_out_reductions();
    lay_out_amaxes();
    if (plan_.options.train && plan_.options.observe) lay_out_observations();
    lay_out_activations();
    if (plan_.options.snapshot) lay_out_snapshot();
    if ((!plan_.stores.empty() || plan_.over_ranks_bytes > 0) && worth_slots(plan_)) lay_out_slots();
  }

 private:
  void lay_out_snapshot() {
    for (const StatePart& part : own_training_state(plan_))
      plan_.snapshot_bytes = checked_sum(plan_.snapshot_bytes, byte_count(part.extents, part.tensor.dtype));
    plan_.owners.push_back({"checkpoint copy", MemoryKind::pinned, plan_.snapshot_bytes});
  }

  /// What a step takes from the host and gives back.
  void lay_out_inputs() {
    for (const Value& input : plan_.uploaded)
      add_tensor({{input.name}, TensorOwner::input, input.dtype, extents_at(input.shape, plan_.options.geometry)});
    for (const PlannedTensor& tensor : plan_.tensors)
      if (tensor.owner == TensorOwner::input)
        plan_.staging_slot_bytes = checked_sum(plan_.staging_slot_bytes, tensor.bytes());
    // One slot an upload, and one for results.
    plan_.pinned_bytes = checked_sum(checked_product(plan_.staging_slot_bytes, plan_.options.uploads),
                                     std::int64_t{sizeof(LossStats) + sizeof(UpdateState)});
    plan_.owners.push_back({"staging", MemoryKind::pinned, plan_.pinned_bytes});
    for (const char* name : {names::kLossStats, names::kEvalStats})
      add_tensor({{name}, TensorOwner::input, DType::f64, {4}});
    add_tensor({{names::kUpdate}, TensorOwner::input, DType::f32, {4}});
    if (plan_.defers_update()) {
      const PlannedTensor& step = plan_.tensor({names::kStep});
      add_tensor({{names::kUpdateStep}, TensorOwner::input, step.dtype, step.extents});
    }
  }

  Extents logits_extents(const Program& program) const {
    return extents_at(program[program.outputs[0]].shape, plan_.options.geometry);
  }

  void lay_out_results() {
    if (plan_.options.logits)
      add_tensor({{names::kLogits},
                  TensorOwner::result,
                  plan_.head_logits.program[plan_.head_logits.program.outputs[0]].dtype,
                  logits_extents(plan_.head_logits.program)});
    if (plan_.options.next_logits) {
      add_tensor({{names::kRows}, TensorOwner::input, DType::i32, {plan_.options.geometry.batch}});
      add_tensor({{names::kNextLogits}, TensorOwner::result, DType::f32, logits_extents(plan_.head_next.program)});
    }
  }

  /// States of programs, one of each a layer, side by side; then what they advance by.
  void lay_out_states() {
    lay_out_states(TensorOwner::precision);
    lay_out_states(TensorOwner::statistic);
  }

  void lay_out_states(TensorOwner owner) {
    auto states = [&](const Program& program, int layer) {
      for (const Value& value : program.values)
        if (value.role == Role::state && value.parameter.empty() && !plan_.find({value.name}) &&
            !plan_.find({value.name, "", layer}) &&
            (program.state(value.name) != nullptr) == (owner == TensorOwner::precision))
          add_tensor({{value.name, "", layer}, owner, value.dtype, extents_at(value.shape, plan_.options.geometry)});
    };
    for (const Program* program : {&plan_.head_train.program, &plan_.head_evaluate.program, &plan_.embed.program})
      states(*program, -1);
    for (int layer = 0; layer < plan_.model.layers; ++layer) {
      const LayerClass& layer_class = plan_.layer_class(layer);
      for (const Program* program :
           {&layer_class.forward.program, &layer_class.backward.program, &layer_class.evaluate.program})
        states(*program, layer);
    }
  }

  void lay_out_reductions() {
    std::vector<const PlacedProgram*> reductions{&plan_.amaxes};
    for (const PlacedProgram& squares : plan_.squares) reductions.push_back(&squares);
    lay_out_shard_squares();
    for (const PlacedProgram* reduction : reductions)
      for (const Op& op : reduction->program.ops) {
        const Value& result = reduction->program[op.outputs[0]];
        const TensorId id = reduction->id_of(op.outputs[0]);
        if (id.kind == names::kOwnSquares)
          lay_out_own_squares(element_count(fixed_extents(result.shape)));
        else if (!is_part_of_shard_squares(id))
          add_tensor({id, TensorOwner::input, result.dtype, fixed_extents(result.shape)});
      }
    for (std::size_t i = 0; i < tensors_.scaled.size(); ++i) {
      PlannedTensor amax = plan_.tensor({names::kAmaxes}).part_at({{1}, static_cast<std::int64_t>(i)});
      amax.kind = names::kAmax;
      amax.parameter = tensors_.scaled[i].spec.name;
      amax.layer = tensors_.scaled[i].layer;
      plan_.add(std::move(amax));
    }
  }

  /// Of masters that are updated in slices, and of frozen weights.
  void lay_out_amaxes() {
    each_loaded([&](const ParameterPlan& parameter, int layer) {
      if (!plan_.forms_of(parameter, layer).amax.program.ops.empty())
        add_tensor({{names::kAmax, parameter.spec.name, layer}, TensorOwner::input, DType::f32, {1}});
    });
    for (const UpdateWindow& window : plan_.updates)
      for (const PlacedProgram& placed : window.follow)
        for (const Value& value : placed.program.values) {
          if (value.name != names::kSliceAmaxes) continue;
          auto add = [&](const char* kind, Extents extents) {
            add_tensor({{kind, value.parameter, window.layer}, TensorOwner::input, DType::f32, std::move(extents)});
          };
          if (!plan_.find({names::kAmax, value.parameter, window.layer})) add(names::kAmax, {1});
          add(names::kSliceAmaxes, fixed_extents(value.shape));
        }
  }

  /// Those that are made layer by layer, one behind the other.
  void lay_out_shard_squares() {
    std::vector<std::pair<TensorId, Shard>> parts;
    std::int64_t count = 0;
    for (const PlacedProgram& squares : plan_.squares)
      for (const Op& op : squares.program.ops) {
        TensorId id = squares.id_of(op.outputs[0]);
        if (!is_part_of_shard_squares(id)) continue;
        const Extents extents = fixed_extents(squares.program[op.outputs[0]].shape);
        parts.emplace_back(std::move(id), Shard{extents, count});
        count += element_count(extents);
      }
    if (count == 0) return;
    add_tensor({{names::kShardSquares}, TensorOwner::input, DType::f64, {count}});
    for (auto& [id, shard] : parts) {
      PlannedTensor part = plan_.tensor({names::kShardSquares}).part_at(shard);
      static_cast<TensorId&>(part) = std::move(id);
      plan_.add(std::move(part));
    }
  }

  void lay_out_own_squares(std::int64_t count) {
    const StatePlacement& state = plan_.options.state;
    add_tensor({{names::kShardSquares}, TensorOwner::input, DType::f64, {count * state.ranks}});
    PlannedTensor own = plan_.tensor({names::kShardSquares}).part_at({{count}, count * state.rank});
    own.kind = names::kOwnSquares;
    plan_.add(std::move(own));
  }

  void lay_out_observations() {
    auto observations = [&](const Program& program, int layer) {
      for (const Value& value : program.values)
        if (value.role == Role::observation)
          add_tensor({{value.name, "", layer}, TensorOwner::observation, value.dtype, fixed_extents(value.shape)});
    };
    for (const Program* program : {&plan_.embed.program, &plan_.embed_backward.program, &plan_.head_train.program})
      observations(*program, -1);
    for (int layer = 0; layer < layers(); ++layer)
      for (const Program* program :
           {&plan_.layer_class(layer).forward.program, &plan_.layer_class(layer).backward.program})
        observations(*program, layer);
    for (const ParameterPlan& parameter : plan_.parameters)
      for_each_layer(parameter.spec, layers(),
                     [&](int layer) { observations(plan_.forms_of(parameter, layer).observe.program, layer); });
  }

  void lay_out_activations() {
    const std::int64_t begin = plan_.device_bytes;
    for (int layer = 0; layer < layers() && plan_.options.train; ++layer) lay_out_saved(layer);
    lay_out_loading(begin);
    std::int64_t most = 0;
    for (const Run& run : all_runs()) {
      std::vector<Stop> order = order_of(plan_, run);
      most = std::max(most, run_memory(plan_, order).bytes);
      for (const Stop& stop : order)
        if (stop.flow != Stop::Flow::none) plan_.passage_bytes = std::max(plan_.passage_bytes, stop.program->bytes);
    }
    plan_.transient_offset = reserve(kTransient, most);
  }

  template <class Visit>
  void each_loaded(Visit visit) {
    for (const ParameterPlan& parameter : plan_.parameters)
      for_each_layer(parameter.spec, layers(), [&](int layer) {
        if (plan_.forms_of(parameter, layer).loads) visit(parameter, layer);
      });
  }

  /// Frozen weights that ops read in other forms alone, one after the other, where steps have activations, and on into
  /// transient memory.
  void lay_out_loading(std::int64_t begin) {
    std::int64_t most = 0;
    each_loaded([&](const ParameterPlan& parameter, int layer) {
      const ParameterSpec& spec = parameter.spec;
      most = std::max(most, byte_count(spec.extents, parameter.master));
      plan_.add({{names::kMaster, spec.name, layer}, TensorOwner::loading, parameter.master, spec.extents, begin});
    });
    plan_.loading_bytes = std::max<std::int64_t>(most - (plan_.device_bytes - begin), 0);
  }

  // The schedules say what a window holds at once.
  void lay_out_slots() {
    plan_.ring =
        ring_for(make_slot_schedules(plan_), plan_.alignment, plan_.options.ahead, std::move(plan_.ring.spare));
    if (plan_.ring.bytes == 0) return;
    plan_.ring.offset = reserve(kSlots, plan_.ring.bytes);
    lay_out_kept(plan_);
  }

  // Scales and the like stay on the device: a transfer of them would take as long as one of some kilobytes.
  void lay_out_saved(int layer) {
    for (const bool movable : {true, false})
      for (const Value& value : plan_.layer_class(layer).saved)
        if (movable == (plan_.bytes_of(value) > plan_.alignment))
          add_tensor({{value.name, "", layer},
                      TensorOwner::activation,
                      value.dtype,
                      extents_at(value.shape, plan_.options.geometry)},
                     movable ? TensorOwner::activation : TensorOwner::input);
  }

  const PlannedTensors& tensors_;
};

}  // namespace

void lay_out_kept(Plan& plan) {
  const std::int64_t bytes = plan.ring.kept = plan.options.kept_bytes;
  plan.device_bytes = checked_sum(plan.device_bytes, bytes);
  for (OwnerBytes& owner : plan.owners)
    if (owner.owner == kSlots && owner.store < 0) owner.bytes += bytes;
}

void lay_out(Plan& plan, const PlanParts& parts, const PlannedTensors& tensors,
             const std::function<bool(const Plan&)>& worth_slots) {
  Layout(plan, parts, tensors).run(worth_slots);
}

}  // namespace quern
