#pragma once
// The plan of a run: every program, placed, and every byte of device memory by owner, known before the device is
// touched. `quern plan` prints it; the engine allocates and runs it.

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "optimizer/update_traits.h"
#include "plan/placement.h"
#include "plan/schedule.h"
#include "plan/shards.h"
#include "program/names.h"
#include "program/passes/lower_precision.h"
#include "program/passes/place.h"
#include "quern/device.h"
#include "quern/model.h"
#include "quern/offload.h"
#include "quern/optimizer.h"
#include "quern/precision.h"

namespace quern {

/// What the planner may choose from, besides the model.
struct PlanOptions {
  Geometry geometry;                   ///< of one micro-batch
  DType master = DType::f32;           ///< f32, or bf16 with stochastic rounding
  bool masters = true;                 ///< false: none of weights whose only form is int8 (quantize_weights)
  DType gradient = DType::f32;         ///< accumulation of parameter gradients
  std::vector<std::string> recompute;  ///< see kRecomputeNames
  std::int64_t first_layers = 0;       ///< high-precision layers: so many at the beginning,
  std::int64_t last_layers = 0;        ///< and so many at the end
  std::int64_t device_budget = 0;      ///< bytes; with it, or the next, the planner chooses what stays within both
  std::int64_t host_budget = 0;        ///< bytes, pinned and of stores in host memory; 0: any number
  std::int64_t disk_budget = 0;        ///< bytes of stores that are not in host memory; 0: any number
  std::vector<std::string> stores;     ///< that it may choose: the first for any state, others for the optimizer's
  StatePlacement state;                ///< ranks, shards and memories of parameter state and activations
  std::int64_t accumulation = 1;       ///< micro-batches of a step on this rank, for estimates
  bool uneven = false;                 ///< some ranks have one less
  bool documents = false;              ///< attention stays within documents
  bool logits = false;                 ///< also plan a program that gives the logits of a micro-batch
  bool next_logits = false;            ///< also plan a program that gives the logits of one token of each row
  double z_loss = 0;                   ///< weight of logsumexp^2 in the objective
  std::int64_t loss_chunk = 0;         ///< tokens whose logits are made at once; 0: as many as the device likes
  int uploads = 2;                     ///< micro-batches that may be handed over before the host waits for the device
  bool observe = false;                ///< also plan ops that tell, in steps that ask, what scales of tensors lose
  bool snapshot = false;               ///< host memory for a copy of the state that checkpoints hold
  bool train = true;                   ///< false: evaluation only, no gradients and no optimizer state
  std::int64_t kept_bytes = 0;         ///< for values of stores and ranks that stay where several windows read them
  int ahead = 1;                       ///< windows whose values come from stores while an earlier one runs
  /// State that a window of the update takes at most, as far as it can be split.
  std::int64_t update_window_bytes = std::int64_t{128} << 20;
  /// Weights whose matmuls are in high precision in every layer, as in high-precision layers.
  std::vector<std::string> outer_parameters = {};
};

/// A precision backend with values for its "auto" options.
struct PrecisionForm {
  std::vector<std::pair<std::string, std::string>> values;  ///< ("precision.e4m3.transposed_weights", "made")
  const PrecisionBackend* backend = nullptr;
};

/// Components of a run; all outlive the plan's making, none is kept.
struct PlanParts {
  const Model& model;
  const PrecisionBackend& precision;
  const Device& device;
  const Optimizer& optimizer;
  const std::vector<OpSpec>& custom_ops;
  const PrecisionBackend* outer_precision = nullptr;  ///< of the high-precision part; none: `precision` for all
  std::vector<OffloadTraits> stores = {};             ///< a store that is not among them is taken to be in host memory
  std::int64_t communicator_bytes = 0;                ///< of device memory, by the ranks' communicator
  /// Backends of the same bits as `precision`, but for the order in which matmuls accumulate, one of which trains;
  /// empty: that one. Without a budget it is the first that fits.
  std::vector<PrecisionForm> forms = {};

  /// Of the store of that id; null: not among them.
  const OffloadTraits* store(std::string_view id) const;
  /// These, with that backend and no other form.
  PlanParts with(const PrecisionBackend& backend) const;
};

/// PlanOptions::uploads for so many micro-batches a step: enough that the device never waits for the host.
int uploads_for(std::int64_t micro_batches);

/// Whose memory a persistent tensor is.
enum class TensorOwner : std::uint8_t {
  master,
  working,
  gradient,
  optimizer,
  precision,  ///< states of programs: the precision backend's, and the model's (Plan::model_states)
  statistic,  ///< what states of the model advance by: sums over a step
  input,
  observation,
  result,
  loading,     ///< frozen weights before they have the form that ops read: in memory that steps use
  activation,  ///< values that layers keep for the backward pass: they do not outlast a micro-step
};
std::string_view name_of(TensorOwner owner);
/// Where tensors of an owner are.
const Placement& placement_of(TensorOwner owner, const StatePlacement& state);

/// A tensor that outlasts programs: one parameter's master, gradient, moment, ..., of one layer; what a layer keeps.
struct PlannedTensor : TensorId {
  TensorOwner owner = TensorOwner::input;
  DType dtype = DType::f32;
  Extents extents = {};
  std::int64_t offset = 0;    ///< in the device arena, or in the store
  std::int32_t store = -1;    ///< index into Plan::stores; -1: on the device
  Extents whole = {};         ///< over all ranks, where `extents` are this rank's shard of it; else empty
  std::int64_t first = 0;     ///< element of `whole` where the shard begins
  std::int64_t part_of = -1;  ///< offset of the tensor whose bytes these are too; -1: none
  bool over_ranks = false;    ///< the whole of what ranks have parts of: only in slots, `offset` is in Space::ranks
  std::int64_t bytes() const { return byte_count(extents, dtype); }
  /// Whether checkpoints hold it; else steps make it anew, or it is loaded again.
  bool is_training_state() const {
    return owner == TensorOwner::master || owner == TensorOwner::optimizer || owner == TensorOwner::precision;
  }
  const Extents& whole_extents() const { return whole.empty() ? extents : whole; }
  Place place() const {
    if (over_ranks) return {Space::ranks, 0, offset, bytes()};
    return {store < 0 ? Space::device : Space::store, std::max(store, 0), offset, bytes()};
  }
  /// A part of its bytes; `shard` is of the whole over all ranks.
  PlannedTensor part_at(const Shard& shard) const;
};

/// What is kept in one offload store.
struct StorePlan {
  std::string id;
  std::int64_t bytes = 0;
  bool in_host_memory = true;
  bool in_place = false;      ///< kernels read and write there; else it comes to slots and goes back
  std::int64_t capacity = 0;  ///< bytes; 0: not known
  StoreRates rates = {};
};

/// Programs of layers that are alike.
struct LayerClass {
  std::string name;
  PlacedProgram forward = {}, backward = {}, evaluate = {};
  PlacedProgram advance = {};     ///< of the precision backend's states, once per optimizer step
  std::vector<Value> saved = {};  ///< what a layer keeps for the backward pass
};

/// What makes a parameter's working copies in the layers of a class.
struct ParameterForms {
  PlacedProgram refresh;  ///< them or this rank's rows of them, from the master; empty when it is the working copy
  PlacedProgram rest;     ///< values made from working copies once they are gathered
  std::vector<Value> gathered;  ///< working copies of which each rank makes its rows
  PlacedProgram amax;           ///< of this rank's rows, where `refresh` reads all ranks'; else empty
  bool loads = false;           ///< frozen, and no op reads the master: it is there while `refresh` runs, by Run::load
  PlacedProgram observe;        ///< of the quantized ones among them; empty unless options.observe
};

struct ParameterPlan {
  ParameterSpec spec;
  UpdateTraits update = {};  ///< nothing if it is frozen
  DType master = DType::f32;
  /// Its quantized values and scales, as ops read them, where they are the master; else empty.
  std::vector<Value> quantized = {};
  RowBounds bounds = {};                   ///< of its shards; empty: every rank has the whole
  RowBounds pieces = {};                   ///< of its gradient, for sums of squares of a tree; empty: not cut
  bool shards_weights = false;             ///< working copies too: ranks gather them for each use
  bool shards_gradient = false;            ///< and its gradient, which they reduce for each micro-batch
  std::vector<ParameterForms> forms = {};  ///< by layer class; one for all outside the layers
};

/// A parameter's tensors of one layer, or rows of them.
struct UpdatePart {
  std::size_t parameter = 0;  ///< index into Plan::parameters
  int layer = -1;
  RowSlice rows = {};
};

/// What takes its state from stores together: all of the update, or a window of one group or layer.
struct UpdateWindow {
  ParameterGroup group = ParameterGroup::embedding;
  int layer = -1;
  std::vector<UpdatePart> parts = {};  ///< what the optimizer updates; followed by the refresh of those that are whole
  PlacedProgram program = {};          ///< which does that
  PlacedProgram exchange = {};         ///< masters of the parts for what evaluations use instead (Run::exchange)
  RowSlice rows = {};                  ///< of the one part, or of what follows
  std::vector<PlacedProgram> follow = {};  ///< ops on its rows behind that: amaxes and working copies
  std::vector<std::size_t> agrees = {};    ///< parameters on whose amaxes ranks then agree; working copies read them
};

/// visit(layer) for each layer that has the parameter; -1 when it is none of the blocks'.
template <class Visit>
void for_each_layer(const ParameterSpec& spec, int layers, Visit visit) {
  if (spec.group != ParameterGroup::block) return visit(-1);
  for (int layer = 0; layer < layers; ++layer) visit(layer);
}

/// visit(group, layer), in the order of the forward pass; -1 outside the layers.
template <class Visit>
void for_each_group(std::int64_t layers, Visit visit) {
  visit(ParameterGroup::embedding, -1);
  for (int layer = 0; layer < layers; ++layer) visit(ParameterGroup::block, layer);
  visit(ParameterGroup::head, -1);
}

struct OwnerBytes {
  std::string owner;
  MemoryKind memory = MemoryKind::device;
  std::int64_t bytes = 0;
  std::int32_t store = -1;  ///< index into Plan::stores, instead of `memory`
};

/// Owners whose bytes depend on recomputation.
inline constexpr const char* kSavedActivations = "saved activations";
inline constexpr const char* kTransient = "transient";
inline constexpr const char* kSlots = "slots";

/// The planner's choice for an "auto" key.
struct Decision {
  std::string key, configured, value, reason;
  std::string assignment;  ///< "memory.master=host", which repeats it; empty: the budgets do
};

struct Plan {
  PlanOptions options;  ///< with every placement chosen
  ModelTraits model;
  std::vector<Value>
      uploaded;  ///< what the host sends for each micro-batch, in this order; the step's state is the last
  std::set<std::string, std::less<>> model_states;  ///< names of states that the model's programs declare
  OpSet ops;
  std::set<std::string> exclusive;  ///< op kinds whose kernels run on one stream at a time
  std::int64_t parameter_count = 0;

  // ---- programs ----
  PlacedProgram embed, embed_backward, head_train, head_evaluate, head_logits, head_next, head_advance;
  std::vector<LayerClass> classes;
  std::vector<int> class_of_layer;
  /// By ParameterGroup: adds a micro-batch's gradients to the partial sums of a tree; empty without one.
  std::vector<PlacedProgram> trees;
  PlacedProgram norm;  ///< gradient norm and clip scale; empty when not training, as the next two
  /// One of all tensors; or, if stores have any, in the order of the forward pass.
  std::vector<UpdateWindow> updates;
  /// The norm's terms: by layer + 1 where stores have the gradients, or shards and then tensors that are
  /// whole on every rank; empty: the norm reads all gradients.
  std::vector<PlacedProgram> squares;
  PlacedProgram amaxes;  ///< of masters of which this rank has a shard
  std::vector<ParameterPlan> parameters;

  // ---- memory ----
  std::vector<PlannedTensor> tensors;   ///< by `add`, which `find` knows them by
  std::int64_t alignment = 1;           ///< of every offset
  std::int64_t transient_offset = 0;    ///< of what runs place by lifetime: schedule/run_memory.h
  std::int64_t loading_bytes = 0;       ///< from there on, of frozen weights while they are loaded
  std::int64_t over_ranks_bytes = 0;    ///< of what has no memory: its place in Space::ranks
  std::int64_t passage_bytes = 0;       ///< from transient_offset on, free between runs, alike on all ranks
  std::int64_t device_bytes = 0;        ///< of the arena
  std::int64_t beside_bytes = 0;        ///< what the device and communicators take of its memory beside the arena
  std::int64_t staging_slot_bytes = 0;  ///< pinned host memory of one micro-batch
  std::int64_t pinned_bytes = 0;        ///< all of that
  std::int64_t snapshot_bytes = 0;      ///< pinned host memory of a copy of own_training_state
  std::vector<OwnerBytes> owners;
  std::vector<StorePlan> stores;
  SlotRing ring;  ///< where values of stores are while they are used

  // ---- the order of a step ----
  ScheduleSet schedules;

  // ---- estimates ----
  double flops_per_token = 0;  ///< of a training step, without recomputation
  double seconds_per_micro_step = 0;
  double seconds_per_step = 0;           ///< of options.accumulation micro-steps and the update; 0 when not training
  std::vector<Decision> decisions = {};  ///< of the planner's choice

  /// Of a rank, by the estimate of a step.
  double tokens_per_second() const {
    return static_cast<double>(options.geometry.tokens() * options.accumulation) / seconds_per_step;
  }
  /// All of the device's memory that the run takes.
  std::int64_t device_total() const { return device_bytes + beside_bytes; }
  /// Pinned, and of stores in host memory.
  std::int64_t host_bytes() const;
  /// Of stores that are not in host memory.
  std::int64_t disk_bytes() const { return stored_bytes(false); }
  /// "qkv.weight and o.weight, of which op "muon" needs whole matrices": what every rank keeps and updates whole
  /// although ranks shard the optimizer. Empty: nothing.
  std::string whole_on_ranks() const;
  /// Whether parameters are frozen.
  bool has_frozen() const {
    return std::any_of(parameters.begin(), parameters.end(), [](const auto& p) { return !p.spec.trainable; });
  }
  /// Whether the update is deferred to the next step's forward pass (Run::apply).
  bool defers_update() const { return updates.size() > 1; }
  /// Whether ranks gather or reduce in every micro-step and forward pass, so that all have to run as many.
  bool shards_micro_steps() const { return over_ranks_bytes > 0; }
  void add(PlannedTensor tensor);
  /// One of `tensors`.
  const PlannedTensor* find(const TensorId& id) const;
  /// A missing one is an internal error.
  const PlannedTensor& tensor(const TensorId& id) const;
  /// Also a part of one of them.
  PlannedTensor part(TensorId id) const;
  std::int64_t bytes_of(const Value& value) const {
    return byte_count(extents_at(value.shape, options.geometry), value.dtype);
  }
  const LayerClass& layer_class(int layer) const {
    return classes[static_cast<std::size_t>(class_of_layer[static_cast<std::size_t>(layer)])];
  }
  /// Index of a layer's class among programs that a parameter has by class; -1 outside the layers.
  std::size_t class_index(int layer) const {
    return layer < 0 ? 0 : static_cast<std::size_t>(class_of_layer[static_cast<std::size_t>(layer)]);
  }
  /// Of a parameter in that layer; -1 outside the layers.
  const ParameterForms& forms_of(const ParameterPlan& parameter, int layer) const {
    return parameter.forms[class_index(layer)];
  }
  /// A missing one is an internal error.
  const ParameterPlan& parameter(std::string_view name) const;

 private:
  std::int64_t stored_bytes(bool in_host_memory) const;
  struct Hash {
    std::size_t operator()(const TensorId& id) const {
      const std::hash<std::string_view> text;
      return (text(id.kind) * 31 + text(id.parameter)) * 31 + static_cast<std::size_t>(id.layer * 31 + id.part);
    }
  };
  std::unordered_map<TensorId, std::size_t, Hash> index_;  // of `tensors`
};

/// The working copy that programs call `value`.
inline TensorId working_id(const std::string& parameter, const std::string& value, int layer) {
  return {value == parameter ? names::kWorking : value, parameter, layer};
}

/// Runs all passes and lays memory out. Needs no hardware. What the device cannot run, and a plan that does not fit its
/// memory or the budget, are resources errors that say what binds.
Plan make_plan(const PlanParts& parts, const PlanOptions& options);

/// Checks the schedules of this plan, and with several ranks also the others' and all of them together; a broken rule
/// is an internal error.
void verify_all_ranks(const PlanParts& parts, const Plan& plan);

/// What a checkpoint holds: masters, optimizer state and the precision backend's states, in the order of the plan.
/// Frozen weights are loaded again from where they came.
std::vector<PlannedTensor> training_state(const Plan& plan);
/// A rank's part of one of these tensors.
struct StatePart {
  PlannedTensor tensor;
  std::int64_t first = 0;  ///< element of what this rank has of it
  Extents extents = {};    ///< of the part
};
/// What this rank writes of them: its shards, and of tensors that every rank has whole some rows; rank 0 the rest.
/// Parts of a tensor follow each other as their ranks do.
std::vector<StatePart> own_training_state(const Plan& plan);

/// Programs as text, after a named pass: "model", "rotate", "differentiate", "lower", "as_stored", "saved", "fuse",
/// "place".
std::string show_programs(const PlanParts& parts, const PlanOptions& options, std::string_view pass);

}  // namespace quern
