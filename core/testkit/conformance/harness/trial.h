#pragma once
// Small trainings: an engine made of the parts under test and plain ones, and what contracts and tests read from it.

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "conformance/subject.h"
#include "engine/engine.h"
#include "quern/random.h"

namespace quern::conformance {

using Tensors = std::map<std::string, std::vector<float>>;    ///< by tensor_name
using State = std::map<std::string, std::vector<std::byte>>;  ///< of a checkpoint, by its names

/// "parameter/layer"; "parameter" of a tensor outside layers.
std::string tensor_name(const PlannedTensor& tensor);

/// Random tokens; about one target in eleven does not count.
Batch random_batch(const Geometry& geometry, std::int64_t vocabulary, std::uint64_t seed);
/// Random inputs of all that the plan's model reads.
Batch random_batch(const Plan& plan, std::uint64_t seed);

/// The parts of a trial; null parts are plain: fp32 matmuls, AdamW.
struct TrialParts {
  const Model& model;
  Device& device;  ///< open
  const PrecisionBackend* precision = nullptr;
  const Optimizer* optimizer = nullptr;
};

/// Of the stores that the placements name, by plugins' default options.
std::vector<OffloadTraits> traits_of_stores(PluginHost& host, const StatePlacement& state);

class Trial {
 public:
  /// Custom ops come from the plugins loaded into `host`. `parts` outlive the trial.
  Trial(PluginHost& host, const TrialParts& parts, PlanOptions options);
  /// With stores of the plugins that the plan names. `device` is open and outlives the trial.
  Trial(PluginHost& host, Plan plan, Device& device);

  Engine& engine() { return *engine_; }
  const Plan& plan() const { return engine_->plan(); }

  std::vector<float> tensor(const std::string& kind, const std::string& parameter, int layer);
  void write(const std::string& kind, const std::string& parameter, int layer, const std::vector<float>& values);
  Tensors all(const std::string& kind);
  /// Of one micro-batch, added to the gradients of `micro_steps_before`.
  Tensors gradients(const Batch& batch, std::uint32_t micro_steps_before = 0);
  /// Adds noise to master weights of parameters whose names end with `ending`: away from the initial values, where
  /// biases are zero and gradients of some weights vanish.
  void stir(std::string_view ending = "");
  /// Mean loss, nats a target token, and the sum behind it.
  double loss(const Batch& batch);
  double loss_sum(const Batch& batch) { return engine_->evaluate(batch).loss_sum; }
  /// Optimizer steps `first` up to `end`, the end excluded, on a fixed sequence of batches; returns the last mean loss.
  double train(std::uint32_t first, std::uint32_t end);

  State state();
  void restore(const State& state);

 private:
  std::vector<std::unique_ptr<OffloadStore>> stores_;
  std::unique_ptr<Engine> engine_;
};

/// Names a tensor whose bytes differ; empty when none does.
std::string first_difference(const State& got, const State& want);
std::string first_difference(const Tensors& got, const Tensors& want);

/// Trains three steps; then two, a restart from the saved state in newly made parts, and one: the same bits. `make`
/// makes a trial with everything of the plugin in it new.
std::string resumes(const std::function<std::unique_ptr<Trial>()>& make);

}  // namespace quern::conformance
