#pragma once
// Programs over a run's state rather than its activations: the norm of the gradients, the optimizer's update, the
// working forms of a weight, and what precision states do at the end of a step.

#include <functional>
#include <string>
#include <vector>

#include "plan/programs/program_set.h"
#include "plan/shards.h"

namespace quern {

/// Whether it is what StatePrograms::shard_squares makes.
inline bool is_part_of_shard_squares(const TensorId& id) {
  return id.kind == names::kShardSquares && id.part == TensorId::kOwn;
}

/// A master of which working copies have one scale for all ranks' rows.
struct ScaledMaster {
  ParameterSpec spec;
  int layer = -1;
  std::string format;
};

/// Programs that are not placed yet. Those over several layers say which tensors their values are.
class StatePrograms {
 public:
  enum class Split { shards, whole };

  /// All arguments outlive it; the plan gets its parameters later. Masters, gradients and optimizer state are this
  /// rank's shards.
  StatePrograms(const PlanParts& parts, const ProgramSet& set, const Plan& plan)
      : parts_(parts), set_(set), plan_(plan) {}

  /// The norm of all gradients, and what it is clipped by.
  PlacedProgram norm() const;
  /// The same in two parts, for gradients that are not all on the device at once: the sums of squares of a layer's, -1
  /// for those outside, and what adds up all of these.
  PlacedProgram squares(int layer) const;
  /// The same of shards, whose sums ranks add up, or of gradients that are whole on every rank; no ops: there are none.
  PlacedProgram squares(Split split) const;
  /// Of a layer's shards, neighbours in the tensor of all shards' squares.
  PlacedProgram shard_squares(int layer) const;
  /// Adds what a micro-batch left to the partial sums of a tree: gradients of a group, and the head's losses. No ops:
  /// the rank has one micro-batch of a step.
  Program sum_tree(ParameterGroup group) const;
  PlacedProgram norm_of_squares(const std::vector<PlacedProgram>& squares) const;
  /// The largest magnitudes of those masters.
  PlacedProgram amaxes(const std::vector<ScaledMaster>& masters) const;
  /// Updates these parts, under the state of the step that `step` names.
  PlacedProgram update(const std::vector<UpdatePart>& parts, const char* step) const;
  /// Exchanges the masters of these parts for the states that are evaluated (OptimizerState::evaluated).
  PlacedProgram exchange(const std::vector<UpdatePart>& parts) const;
  /// Values and scales that take the place of the parameter's master, without PlanOptions::masters: in int8, and all
  /// that ops read of it. Empty: it has a master.
  std::vector<Value> quantized_master(const ParameterSpec& spec) const;
  /// Of a frozen parameter it is what ops read: the working dtype.
  DType master_dtype(const ParameterSpec& spec) const;
  /// Makes every working form of a parameter that programs of `stages` read.
  Program refresh(const ParameterSpec& spec, const std::vector<const Stage*>& stages) const;
  /// Whether programs of `stages` read the master itself as the working copy.
  bool reads_master(const ParameterSpec& spec, const std::vector<const Stage*>& stages) const;
  /// What states of these programs do at the end of a step.
  static Program advance(const std::vector<const Stage*>& stages);
  /// The largest magnitude of a tensor in the format, as a state of one element, `name`.
  static Program amax_of(const Value& tensor, const std::string& name, const std::string& format);

 private:
  using Takes = std::function<bool(const ParameterPlan& parameter, int layer)>;
  /// One op over the gradients that `takes` takes, layer by layer.
  Op squares_of(PlacedProgram& to, const Takes& takes) const;
  PlacedProgram squares(const TensorId& sums, const Takes& takes) const;
  static PlacedProgram squares(const TensorId& sums, PlacedProgram to, Op squares);
  /// One op over this rank's pieces of all gradients that are cut.
  Op squares_of_pieces(PlacedProgram& to) const;
  static void add_clip(Program& program, const std::vector<ValueId>& sums);
  /// This rank's part of a tensor, or these rows; `whole`: over all ranks.
  ValueId add_tensor(Program& program, std::vector<TensorId>& tensors, const std::string& kind,
                     const ParameterPlan& parameter, int layer, DType dtype, const Extents& whole,
                     const RowSlice& rows = {}) const;

  const PlanParts& parts_;
  const ProgramSet& set_;
  const Plan& plan_;
};

}  // namespace quern
