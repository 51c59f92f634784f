#pragma once
// The passes in order, for one model on one device: what make_plan places and show_programs prints.

#include <string>
#include <vector>

#include "plan/plan.h"
#include "program/passes/choose_saved.h"
#include "program/passes/fuse.h"
#include "program/passes/rotate.h"

namespace quern {

/// A class of layers (or embedding or head) between the passes.
struct Stage {
  std::string name;
  Program model;       ///< as rotated
  JointProgram joint;  ///< differentiated
  LoweredProgram lowered;
  PartitionedProgram split;             ///< layers and embedding only
  Program forward, backward, evaluate;  ///< fused; the head's `forward` is its whole training program
};

class ProgramSet {
 public:
  /// Runs the passes through lowering; `choose` and `fuse_all` finish them.
  ProgramSet(const PlanParts& parts, const PlanOptions& options);

  /// Splits the layers' joint programs and fuses everything.
  void finish(const std::set<std::string>& recomputed);

  const OpSet& ops() const { return ops_; }
  const std::vector<FusionPattern>& patterns() const { return patterns_; }
  const std::vector<ParameterSpec>& parameters() const { return parameters_; }
  const ModelPrograms& written() const { return written_; }

  Stage embed, head;
  std::vector<Stage> layers;  ///< first_block (if it differs) and block
  Program logits;             ///< fused; empty unless asked for

 private:
  Stage make_stage(const Program& program, bool differentiable);

  const PlanParts& parts_;
  const PlanOptions& options_;
  OpSet ops_;
  std::vector<FusionPattern> patterns_;
  std::vector<ParameterSpec> parameters_;
  ModelPrograms written_;
};

}  // namespace quern
