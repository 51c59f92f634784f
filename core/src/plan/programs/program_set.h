#pragma once
// The passes in order, for one model on one device: what make_plan places and show_programs prints.

#include <compare>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "plan/plan.h"
#include "program/passes/choose_saved.h"
#include "program/passes/fuse.h"
#include "program/passes/rotate.h"

namespace quern {

/// A class of layers (or embedding or head) between the passes.
struct Stage {
  std::string name;
  Program model;                  ///< as rotated
  JointProgram joint = {};        ///< differentiated
  Program transposing = {};       ///< lowered, with all transposed copies that the precision backend asks for
  LoweredProgram lowered = {};    ///< with the copies that the device's matmuls need
  PartitionedProgram split = {};  ///< layers and embedding only
  Program forward = {}, backward = {}, evaluate = {};  ///< fused; the head's `forward` is its whole training program
};

/// The recomputed values: `recomputed`, but in the first `richer_layers` layers only `fewer`.
struct RecomputeChoice {
  std::set<std::string> recomputed = {}, fewer = {};
  std::int64_t richer_layers = 0;
  auto operator<=>(const RecomputeChoice&) const = default;
};

/// Classes of layers that are alike.
struct LayerClasses {
  /// The stage that each is of, and whether it recomputes less, in the order of their first layers.
  std::vector<std::pair<int, bool>> stages = {};
  std::vector<int> of_layer = {};
};

class ProgramSet {
 public:
  /// Runs the passes through lowering, which do not depend on where state is placed; `finish` does the rest.
  ProgramSet(const PlanParts& parts, const PlanOptions& options);

  LayerClasses layer_classes(const RecomputeChoice& choice) const;
  /// Splits the layers' joint programs and fuses everything.
  void finish(const RecomputeChoice& choice);
  /// Values to recompute under a policy (names of kRecomputeNames), of all layers' stages.
  std::set<std::string> recomputed(const std::vector<std::string>& policy) const;
  /// The stage of most layers.
  const Stage& typical() const {
    return stages_[static_cast<std::size_t>(stage_of_layer_[stage_of_layer_.size() / 2])];
  }

  const OpSet& ops() const { return ops_; }
  /// The program with the device's fused forms, where it takes them at the plan's sizes.
  Program fused(const Program& program) const;
  const std::vector<ParameterSpec>& parameters() const { return parameters_; }
  /// What the model's programs take from each micro-batch.
  const std::vector<Value>& inputs() const { return inputs_; }
  /// Names of the states that the model's programs declare.
  const std::set<std::string, std::less<>>& states() const { return states_; }
  /// As the model wrote them.
  ModelPrograms written() const;

  Stage embed, head;
  std::vector<Stage> classes;   ///< finished, as layer_classes has them
  Program logits, next_logits;  ///< fused; empty unless asked for

 private:
  /// Throws a config error for high-precision layers or parameters that the model lacks.
  void check_outer() const;
  /// Throws a config error if the run needs of the loss what it does not have.
  void check_loss(const Program& head) const;
  /// Throws a config error if nothing trains.
  void check_trainable() const;
  /// Throws a config error if two parts have one name.
  void check_names() const;
  /// `below`: what its stream comes from trains.
  Stage make_stage(const Program& program, const PrecisionBackend& inner, bool below);
  bool trains(const Program& program) const;
  LoweredProgram as_stored(LoweredProgram lowered) const;
  bool takes(const OpInstance& op) const { return parts_.device.query(op).refusal.empty(); }
  /// Whether any layer, or the embedding before them, trains.
  bool make_layer_stages();
  void finish_stage(Stage& stage, const std::set<std::string>& recomputed);

  const PlanParts& parts_;
  const PlanOptions options_;
  OpSet ops_;
  std::vector<FusionPattern> patterns_;
  std::vector<ParameterSpec> parameters_;
  std::vector<Value> inputs_;
  std::set<std::string, std::less<>> states_;
  ModelPrograms written_;      ///< and rotated
  std::vector<Stage> stages_;  ///< of layers, lowered
  std::vector<int> stage_of_layer_;
};

}  // namespace quern
