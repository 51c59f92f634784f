#include "plan/lay_out.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "plan/programs/update_windows.h"
#include "plan/schedule/make_schedules.h"
#include "plan/schedule/order.h"
#include "program/names.h"
#include "quern/step_state.h"

namespace quern {

namespace {

class Layout {
 public:
  Layout(Plan& plan, const PlanParts& parts, const ProgramSet& set, const Shards& shards, const PlannedTensors& tensors)
      : plan_(plan), parts_(parts), set_(set), shards_(shards), tensors_(tensors) {}

  void run(const std::function<bool(const Plan&)>& worth_slots) {
    lay_out_parameters();
    lay_out_inputs();
    lay_out_results();
    lay_out_states();
    lay_out_reductions();
    lay_out_slice_amaxes();
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

  int layers() const { return static_cast<int>(plan_.model.layers); }

  template <class Visit>
  void for_each_tensor(Visit visit) const {
    for (const ParameterSpec& spec : set_.parameters())
      for_each_layer(spec, layers(), [&](int layer) { visit(spec, layer); });
  }

  std::int64_t alignment() const { return static_cast<std::int64_t>(parts_.device.traits().alignment); }
  std::int64_t aligned(std::int64_t bytes) const { return rounded_up(bytes, alignment()); }

  std::int64_t reserve(const std::string& owner, std::int64_t bytes, std::int32_t store = -1) {
    std::int64_t& end = store < 0 ? plan_.device_bytes : plan_.stores[static_cast<std::size_t>(store)].bytes;
    const std::int64_t offset = end;
    end = checked_sum(end, aligned(bytes));
    auto it = std::find_if(plan_.owners.begin(), plan_.owners.end(),
                           [&](const OwnerBytes& known) { return known.owner == owner && known.store == store; });
    if (it == plan_.owners.end()) it = plan_.owners.insert(it, {owner, MemoryKind::device, 0, store});
    it->bytes += aligned(bytes);
    return offset;
  }

  /// The store that has an owner's state of a layer; -1: the device.
  std::int32_t store_of(TensorOwner owner, int layer) {
    const Placement& placement = placement_of(owner, plan_.options.state);
    if (placement.on_device(layer)) return -1;
    const std::string& memory = placement.memory;
    auto it = std::find_if(plan_.stores.begin(), plan_.stores.end(),
                           [&](const StorePlan& store) { return store.id == memory; });
    if (it == plan_.stores.end()) {
      it = plan_.stores.insert(it, {memory, 0});
      if (const OffloadTraits* traits = parts_.store(memory)) {
        it->in_host_memory = traits->in_host_memory;
        it->in_place = traits->mappable;
      }
    }
    return static_cast<std::int32_t>(it - plan_.stores.begin());
  }

  /// Of a parameter's tensor this rank's shard, where it is split. A master that is read as it is stays whole, on the
  /// device where it is gathered.
  void add_shard(TensorOwner owner, const std::string& kind, const ParameterSpec& spec, int layer, DType dtype) {
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
    const Shard shard = shards_.of(spec);
    PlannedTensor tensor{
        .owner = owner, .kind = kind, .parameter = spec.name, .layer = layer, .dtype = dtype, .extents = shard.extents};
    if (shard.extents != spec.extents) tensor.whole = spec.extents;
    tensor.first = shard.first;
    add_tensor(std::move(tensor), byte_count(shards_.largest(spec), dtype));  // so that all ranks' arenas are alike
  }

  void add_tensor(TensorOwner owner, std::string kind, std::string parameter, int layer, DType dtype, Extents extents) {
    PlannedTensor tensor{owner, std::move(kind), std::move(parameter), layer, dtype, std::move(extents), 0};
    const std::int64_t bytes = tensor.bytes();
    add_tensor(std::move(tensor), bytes);
  }

  /// The whole of what ranks have parts of, or what each use makes of that.
  void add_over_ranks(TensorOwner owner, std::string kind, const std::string& parameter, int layer, DType dtype,
                      Extents extents) {
    PlannedTensor tensor{owner, std::move(kind), parameter, layer, dtype, std::move(extents)};
    tensor.over_ranks = true;
    tensor.offset = plan_.over_ranks_bytes;
    plan_.over_ranks_bytes = checked_sum(plan_.over_ranks_bytes, aligned(tensor.bytes()));
    plan_.add(std::move(tensor));
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

  void add_tensor(PlannedTensor tensor, std::int64_t bytes) {
    const TensorOwner beside = tensor.owner;
    add_tensor(std::move(tensor), bytes, beside);
  }

  /// In the memory of another owner's tensors.
  void add_tensor(PlannedTensor tensor, std::int64_t bytes, TensorOwner beside) {
    tensor.store = store_of(beside, tensor.layer);
    tensor.offset = reserve(std::string(name_of(tensor.owner)), bytes, tensor.store);
    if (const std::int64_t spare = bytes - tensor.bytes(); tensor.store >= 0 && spare > 0)
      spare_[{tensor.store, tensor.offset + tensor.bytes()}] = spare;
    plan_.add(std::move(tensor));
  }

  void lay_out_parameters() {
    for_each_tensor([&](const ParameterSpec& spec, int layer) {
      add_shard(TensorOwner::master, names::kMaster, spec, layer, plan_.options.master);
    });
    for (const ParameterPlan& parameter : plan_.parameters) {
      for_each_layer(parameter.spec, layers(), [&](int layer) { lay_out_working(parameter, layer); });
    }
    if (!plan_.options.train) return;
    for_each_tensor([&](const ParameterSpec& spec, int layer) {
      const ParameterPlan& parameter = plan_.parameter(spec.name);
      const DType dtype = plan_.options.gradient;
      if (!parameter.shards_gradient) return add_whole_gradient(spec, layer);
      add_over_ranks(TensorOwner::gradient, names::kGradient, spec.name, layer, dtype, spec.extents);
      add_part(TensorOwner::gradient, names::kGradient, parameter, layer, dtype, spec.extents);
    });
    for (const OptimizerState& state : parts_.optimizer.states())
      for_each_tensor([&](const ParameterSpec& spec, int layer) {
        add_shard(TensorOwner::optimizer, state.name, spec, layer, state.dtype);
      });
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
    for_each_tensor([&](const ParameterSpec& spec, int layer) {
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

  static PlannedTensor part_of(const PlannedTensor& tensor, const Shard& shard) {
    PlannedTensor part = tensor;
    part.part_of = tensor.offset;
    part.offset += shard.first * static_cast<std::int64_t>(size_of(tensor.dtype));
    part.extents = shard.extents;
    return part;
  }

  void lay_out_working(const ParameterPlan& parameter, int layer) {
    if (parameter.shards_weights) return lay_out_sharded_working(parameter, layer);
    bool copied = false;
    const std::size_t index = plan_.class_index(layer);
    for (const Value& value : tensors_.copies.at(parameter.spec.name)[index]) {
      bool plain = value.name == parameter.spec.name;
      copied = copied || plain;
      add_tensor(TensorOwner::working, plain ? names::kWorking : value.name, parameter.spec.name, layer, value.dtype,
                 extents_at(value.shape, 0));
    }
    if (parameter.bounds.empty()) return add_master_as_working(parameter.spec, layer, copied);
    add_master_part(parameter, layer);
    add_master_as_working(parameter.spec, layer, copied);
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
      const Extents extents = extents_at(value.shape, 0);
      if (gathered(value.name))
        add_part(TensorOwner::working, value.name, parameter, layer, value.dtype, extents);
      else if (forms.rest.program.find(value.name) == kNoValue) {
        add_tensor(TensorOwner::working, kind, name, layer, value.dtype, extents);  // a scale
        continue;
      }
      add_over_ranks(TensorOwner::working, kind, name, layer, value.dtype, extents);
    }
    add_master_part(parameter, layer);
    if (!copied && parts_.precision.traits().working == plan_.options.master)
      add_over_ranks(TensorOwner::working, names::kWorking, name, layer, plan_.options.master, parameter.spec.extents);
  }

  void add_master_as_working(const ParameterSpec& spec, int layer, bool copied) {
    if (copied || parts_.precision.traits().working != plan_.options.master) return;
    PlannedTensor alias = plan_.tensor(names::kMaster, spec.name, layer);  // the master itself is read
    if (!alias.whole.empty()) return;                                      // not a shard of it
    alias.kind = names::kWorking;
    alias.owner = TensorOwner::working;
    plan_.add(std::move(alias));
  }

  /// What a step takes from the host and gives back.
  void lay_out_inputs() {
    const std::int64_t tokens = plan_.options.geometry.tokens();
    for (const char* name : {names::kTokens, names::kTargets, names::kPositions})
      add_tensor(TensorOwner::input, name, "", -1, DType::i32, {tokens});
    if (plan_.options.documents) add_tensor(TensorOwner::input, names::kDocuments, "", -1, DType::i32, {tokens + 1});
    add_tensor(TensorOwner::input, names::kStep, "", -1, DType::u32,
               {static_cast<std::int64_t>(sizeof(StepState) / 4)});
    for (const PlannedTensor& tensor : plan_.tensors)
      if (tensor.owner == TensorOwner::input)
        plan_.staging_slot_bytes = checked_sum(plan_.staging_slot_bytes, tensor.bytes());
    // One slot an upload, and one for results.
    plan_.pinned_bytes = checked_sum(checked_product(plan_.staging_slot_bytes, plan_.options.uploads),
                                     std::int64_t{sizeof(LossStats) + sizeof(UpdateState)});
    plan_.owners.push_back({"staging", MemoryKind::pinned, plan_.pinned_bytes});
    for (const char* name : {names::kLossStats, names::kEvalStats})
      add_tensor(TensorOwner::input, name, "", -1, DType::f64, {4});
    add_tensor(TensorOwner::input, names::kUpdate, "", -1, DType::f32, {4});
    if (plan_.defers_update()) {
      const PlannedTensor& step = plan_.tensor(names::kStep, "", -1);
      add_tensor(TensorOwner::input, names::kUpdateStep, "", -1, step.dtype, step.extents);
    }
  }

  void lay_out_results() {
    if (plan_.options.logits)
      add_tensor(TensorOwner::result, names::kLogits, "", -1,
                 plan_.head_logits.program[plan_.head_logits.program.outputs[0]].dtype,
                 {plan_.options.geometry.tokens(), plan_.model.vocabulary});
    if (plan_.options.next_logits) {
      add_tensor(TensorOwner::input, names::kRows, "", -1, DType::i32, {plan_.options.geometry.batch});
      add_tensor(TensorOwner::result, names::kNextLogits, "", -1, DType::f32,
                 {plan_.options.geometry.batch, plan_.model.vocabulary});
    }
  }

  /// States that the precision backend asked for, one of each a layer.
  void lay_out_states() {
    auto states = [&](const Program& program, int layer) {
      for (const Value& value : program.values)
        if (value.role == Role::state && value.parameter.empty() && !plan_.find(value.name, "", -1) &&
            !plan_.find(value.name, "", layer))
          add_tensor(TensorOwner::precision, value.name, "", layer, value.dtype,
                     extents_at(value.shape, plan_.options.geometry.tokens()));
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
        if (is_part_of_shard_squares(result.name)) continue;
        if (result.name == names::kOwnSquares) {
          lay_out_own_squares(element_count(extents_at(result.shape, 0)));
          continue;
        }
        add_tensor(TensorOwner::input, result.name, "", -1, result.dtype, extents_at(result.shape, 0));
      }
    for (std::size_t i = 0; i < tensors_.scaled.size(); ++i) {
      PlannedTensor amax = part_of(plan_.tensor(names::kAmaxes, "", -1), {{1}, static_cast<std::int64_t>(i)});
      amax.kind = names::kAmax;
      amax.parameter = tensors_.scaled[i].spec.name;
      amax.layer = tensors_.scaled[i].layer;
      plan_.add(std::move(amax));
    }
  }

  void lay_out_slice_amaxes() {
    for (const UpdateWindow& window : plan_.updates)
      for (const PlacedProgram& placed : window.follow)
        for (const Value& value : placed.program.values) {
          if (value.name != names::kSliceAmaxes) continue;
          const Extents extents = extents_at(value.shape, 0);
          if (!plan_.find(names::kAmax, value.parameter, window.layer))
            add_tensor(TensorOwner::input, names::kAmax, value.parameter, window.layer, DType::f32, {1});
          add_tensor(TensorOwner::input, names::kSliceAmaxes, value.parameter, window.layer, DType::f32, extents);
          for (std::int64_t i = 0; i < extents[0]; ++i) {
            PlannedTensor amax = part_of(plan_.tensor(names::kSliceAmaxes, value.parameter, window.layer), {{1}, i});
            amax.kind = slice_amax_name(static_cast<std::size_t>(i));
            plan_.add(std::move(amax));
          }
        }
  }

  /// Those that are made layer by layer, one behind the other.
  void lay_out_shard_squares() {
    std::vector<PlannedTensor> parts;
    std::int64_t count = 0;
    for (const PlacedProgram& squares : plan_.squares)
      for (const Op& op : squares.program.ops) {
        const Value& result = squares.program[op.outputs[0]];
        if (!is_part_of_shard_squares(result.name)) continue;
        parts.push_back({.kind = result.name, .extents = extents_at(result.shape, 0), .first = count});
        count += element_count(parts.back().extents);
      }
    if (count == 0) return;
    add_tensor(TensorOwner::input, names::kShardSquares, "", -1, DType::f64, {count});
    for (const PlannedTensor& named : parts) {
      PlannedTensor part = part_of(plan_.tensor(names::kShardSquares, "", -1), {named.extents, named.first});
      part.kind = named.kind;
      plan_.add(std::move(part));
    }
  }

  void lay_out_own_squares(std::int64_t count) {
    const StatePlacement& state = plan_.options.state;
    add_tensor(TensorOwner::input, names::kShardSquares, "", -1, DType::f64, {count * state.ranks});
    PlannedTensor own = part_of(plan_.tensor(names::kShardSquares, "", -1), {{count}, count * state.rank});
    own.kind = names::kOwnSquares;
    plan_.add(std::move(own));
  }

  void lay_out_observations() {
    auto observations = [&](const Program& program, int layer) {
      for (const Value& value : program.values)
        if (value.role == Role::observation)
          add_tensor(TensorOwner::observation, value.name, "", layer, value.dtype, extents_at(value.shape, 0));
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
    const int layers = this->layers();
    if (plan_.options.train)
      for (int layer = 0; layer < layers; ++layer) lay_out_slab(layer);

    const Program& head = plan_.head_evaluate.program;
    for (std::size_t parity = 0; parity < 2; ++parity)
      for (ValueId id : head.inputs)
        plan_.boundary_buffers[parity].push_back(reserve("streams", plan_.bytes_of(head[id])));
    if (plan_.options.train) {
      for (std::int64_t& buffer : plan_.gradient_buffers)
        buffer = reserve("streams", plan_.bytes_of(head[head.inputs[0]]));
      for (int boundary = 0; boundary <= layers; ++boundary) lay_out_boundary(boundary);
    }
    std::int64_t transient = 0;
    for (int run = 0; run < kRuns; ++run)
      for (const Stop& stop : order_of(plan_, static_cast<Run>(run))) {
        if (!stop.program) continue;
        transient = std::max(transient, stop.program->bytes);
        if (stop.flow != Stop::Flow::none) plan_.passage_bytes = std::max(plan_.passage_bytes, stop.program->bytes);
      }
    plan_.transient_offset = reserve(kTransient, transient);
  }

  // The schedules say what a window holds at once. They are rebuilt once the slots have a place.
  void lay_out_slots() {
    plan_.ring = ring_for(make_largest_schedules(plan_), alignment(), plan_.options.ahead, std::move(spare_));
    if (plan_.ring.bytes > 0) plan_.ring.offset = reserve(kSlots, plan_.ring.bytes);
  }

  void lay_out_slab(int number) {
    const LayerClass& layer = plan_.layer_class(number);
    Slab slab{.store = store_of(TensorOwner::activation, number)};
    slab.offset = reserve(kSavedActivations, slab.store < 0 ? layer.saved_bytes : layer.movable_bytes, slab.store);
    if (slab.store >= 0) slab.rest = reserve(kSavedActivations, layer.saved_bytes - layer.movable_bytes);
    plan_.slabs.push_back(slab);
  }

  // What a neighbour keeps on the device stays where it keeps it; the rest passes through shared buffers, and is put
  // from there where a neighbour keeps it in a store.
  void lay_out_boundary(int boundary) {
    const bool last = boundary == layers();
    const Program& consumer = last ? plan_.head_train.program : plan_.layer_class(boundary).forward.program;
    const Program& producer = boundary == 0 ? plan_.embed.program : plan_.layer_class(boundary - 1).forward.program;
    std::vector<std::int64_t> offsets;
    std::vector<Place> homes;
    for (std::size_t operand = 0; operand < consumer.inputs.size(); ++operand) {
      const Value& made = producer[producer.outputs[operand]];
      const Value& taken = consumer[consumer.inputs[operand]];
      Place kept;
      if (boundary > 0 && made.role == Role::saved)
        kept = plan_.saved_place(boundary - 1, made.name, plan_.bytes_of(made));
      else if (!last && taken.role == Role::saved)
        kept = plan_.saved_place(boundary, taken.name, plan_.bytes_of(taken));
      const bool there = kept.present() && kept.space == Space::device;
      offsets.push_back(there ? kept.offset : plan_.boundary_buffers[boundary % 2][operand]);
      homes.push_back(there ? Place{} : kept);
    }
    plan_.boundary_offsets.push_back(std::move(offsets));
    plan_.boundary_homes.push_back(std::move(homes));
  }

  Plan& plan_;
  const PlanParts& parts_;
  const ProgramSet& set_;
  const Shards& shards_;
  const PlannedTensors& tensors_;
  SpareBytes spare_;
};

}  // namespace

void lay_out(Plan& plan, const PlanParts& parts, const ProgramSet& set, const Shards& shards,
             const PlannedTensors& tensors, const std::function<bool(const Plan&)>& worth_slots) {
  Layout(plan, parts, set, shards, tensors).run(worth_slots);
}

}  // namespace quern
