#pragma once
// Runs a plan on a device: prepares every kernel, allocates the one arena, binds every operand, and then only launches.
// Nothing is allocated, looked up or decided inside a step.

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "plan/binding.h"
#include "plan/plan.h"
#include "quern/communicator.h"
#include "quern/data_source.h"
#include "quern/device.h"
#include "quern/step_state.h"

namespace quern {

/// A launch with its operands in place.
struct BoundLaunch {
  const Kernel* kernel = nullptr;
  const Op* op = nullptr;  ///< for reports; owned by the plan, as is its program
  const Program* program = nullptr;
  std::vector<View> inputs, outputs;
  void* workspace = nullptr;
  std::string name;  ///< kind and first result, "matmul qkv": what profilers and reports call it
};

/// A launch and how long it took alone.
struct LaunchTime {
  const BoundLaunch* launch = nullptr;
  Cost cost;
  double milliseconds = 0;
  bool update = false;  ///< part of the optimizer step
};

/// Whether a step tells what the scales of its tensors lose.
enum class Observe : bool { no, yes };

class Engine {
 public:
  /// `device` must be open and outlive the engine. Throws a resources error when memory cannot be had.
  Engine(Device& device, Plan plan);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const Plan& plan() const { return plan_; }

  // ---- tensors: host copies, blocking ----
  void write(const PlannedTensor& tensor, const void* host);
  void read(const PlannedTensor& tensor, void* host);
  /// All of them, one behind the other.
  void read(const std::vector<PlannedTensor>& tensors, std::byte* host);
  /// Makes the working copies from the masters; after masters were written.
  void refresh();

  // ---- training: enqueued, not awaited ----
  /// Forward and backward of one micro-batch; state.micro_step 0 overwrites gradients and statistics, others add.
  /// Waits for the device when options.uploads micro-batches are on their way.
  /// Observe::yes, for all micro-batches of a step, needs options.observe.
  void micro_step(const Batch& batch, const StepState& state, Observe observe = Observe::no);
  /// Observes the working copies of weights that the last micro-steps read; before the update. Needs options.observe.
  void observe_weights();
  /// Makes the arena known to other ranks; once, before the first reduce.
  void share_memory(Communicator& communicator);
  /// Sums gradients and loss statistics over the ranks, between the last micro-step and the update.
  void reduce(Communicator& communicator);
  /// Gradient norm, optimizer and working copies, under the state that came with the last micro-batch.
  void update();

  // ---- results: blocking ----
  struct StepResult {
    LossStats loss;
    UpdateState update;
  };
  StepResult result();
  /// Loss sums of one batch, without a trace in the training state.
  LossStats evaluate(const Batch& batch);
  /// (N, vocabulary); needs options.logits.
  std::vector<float> logits(const Batch& batch);
  /// (B, vocabulary) of the tokens at `rows`, B indices into the batch's tokens; needs options.next_logits. Leaves no
  /// trace in the training state.
  std::vector<float> next_logits(const Batch& batch, const std::vector<std::int32_t>& rows);

  /// One accumulating micro-step and one update, launch by launch with an event around each.
  std::vector<LaunchTime> profile(const Batch& batch, const StepState& state);

 private:
  using Schedule = std::vector<BoundLaunch>;
  using Written = std::set<std::string>;  // gradients and statistics that have something
  /// Fills all schedules; without an arena it only prepares their kernels.
  void make_schedules();
  void add_program(Schedule& schedule, const PlacedProgram& placed, const Site& site, Written* written,
                   Observe observe = Observe::no);
  Schedule training(bool first, Observe observe);
  Schedule evaluation(const PlacedProgram& head);
  Schedule updates();
  Schedule refreshes();
  Schedule weight_observations();
  const Kernel* kernel_for(const OpInstance& instance);
  View view_of(const PlacedProgram& placed, ValueId id, const Site& site) const;
  View tensor_view(const std::string& kind) const;
  void upload(const Batch& batch, const StepState& state);
  void launch(const BoundLaunch& launch);
  void run(const char* name, Schedule& schedule, std::unique_ptr<Graph>& graph);

  Device& device_;
  Plan plan_;
  Stream compute_;
  std::byte* arena_ = nullptr;
  std::byte* staging_ = nullptr;          // pinned: a slot for each upload, one for results
  int next_slot_ = 0, on_their_way_ = 0;  // uploads that may not be done
  std::map<std::string, std::vector<std::pair<OpInstance, std::unique_ptr<Kernel>>>> kernels_;
  Schedule first_, later_, update_, refresh_, evaluate_, logits_, next_logits_;
  Schedule observed_first_, observed_later_, observe_weights_;
  std::unique_ptr<Graph> first_graph_, later_graph_, update_graph_, refresh_graph_, evaluate_graph_, logits_graph_,
      next_logits_graph_, observed_first_graph_, observed_later_graph_, observe_weights_graph_;
};

}  // namespace quern
