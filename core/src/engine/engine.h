#pragma once
// Runs a plan on a device: prepares every kernel, allocates the one arena, binds every operand, and then only launches.
// Nothing is allocated, looked up or decided inside a step.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "plan/plan.h"
#include "quern/communicator.h"
#include "quern/data_source.h"
#include "quern/device.h"
#include "quern/offload.h"
#include "quern/step_state.h"

namespace quern {

/// A launch and how long it took alone.
struct LaunchTime {
  const Task* task = nullptr;  ///< owned by the engine's plan
  double milliseconds = 0;
  bool update = false;  ///< part of the optimizer step
};

/// Whether a step tells what the scales of its tensors lose.
enum class Observe : bool { no, yes };
/// Whether the update follows a micro-step: gradients are final then.
enum class Last : bool { no, yes };

class Engine {
 public:
  /// `device` must be open. `stores` are those of Plan::stores, by index, open. All outlive the engine. Throws a
  /// resources error when memory cannot be had.
  Engine(Device& device, Plan plan, std::vector<OffloadStore*> stores = {});
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
  /// Observe::yes, for all micro-batches of a step, needs options.observe. A micro-step that says to be the last and is
  /// not costs time and changes nothing.
  void micro_step(const Batch& batch, const StepState& state, Observe observe = Observe::no, Last last = Last::yes);
  /// Observes the working copies of weights that the last micro-steps read; before the update. Needs options.observe.
  void observe_weights();
  /// Makes the arena known to other ranks; once, before the first reduce. The communicator outlives the engine.
  void join(Communicator& communicator);
  /// Sums gradients and loss statistics over the ranks, between the last micro-step and the update.
  void reduce();
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
  /// An action with addresses.
  struct Bound {
    const Kernel* kernel = nullptr;     ///< of a launch
    std::vector<View> inputs, outputs;  ///< of a launch or collective
    void* workspace = nullptr;
  };
  struct BoundRun {
    std::vector<Bound> actions;
    std::vector<std::pair<std::size_t, std::size_t>> segments;  ///< ranges of actions; see make_segments
    std::vector<std::unique_ptr<Graph>> graphs;                 ///< of those that are captured, by segment
    std::vector<Event> events;
    std::vector<Lane> side_lanes;  ///< used beside compute, where the whole run is one segment
  };

  void prepare_kernels();
  void bind(Run run);
  const Kernel* kernel_for(const OpInstance& instance);
  View view_of(const Access& access, const Operand& operand) const;
  std::byte* address(const Place& place) const;
  Stream stream(Lane lane);
  bool can_capture(const RunSchedule& schedule, const Action& action) const;
  void make_segments(const RunSchedule& schedule, BoundRun& bound) const;
  /// Lets the first of these lanes go on only when the second is where it is now.
  void order(Lane later, Lane earlier);
  void synchronize();
  void move(const PlannedTensor& tensor, std::byte* to, const std::byte* from);
  void run(Run run, const std::function<void()>& host = {});
  void run_segment(const RunSchedule& schedule, BoundRun& bound, std::size_t segment,
                   const std::function<void()>& host);
  void act(const RunSchedule& schedule, BoundRun& bound, std::size_t index, const std::function<void()>& host);
  void collect(const Task& task, const Bound& bound, Stream stream);
  void upload(const Batch& batch, const StepState& state);
  void fill_slot(const Batch& batch, const StepState& state);

  Device& device_;
  Plan plan_;
  Stream compute_;
  Communicator* communicator_ = nullptr;
  std::vector<OffloadStore*> stores_;
  std::vector<OffloadSlot> store_slots_;  // one a store, of all that the plan keeps there
  std::byte* arena_ = nullptr;
  std::byte* staging_ = nullptr;          // pinned: a slot for each upload, one for results
  std::byte* slot_ = nullptr;             // the next upload's
  int next_slot_ = 0, on_their_way_ = 0;  // uploads that may not be done
  std::map<std::string, std::vector<std::pair<OpInstance, std::unique_ptr<Kernel>>>> kernels_;
  std::vector<const Kernel*> kernel_of_task_;
  BoundRun runs_[kRuns];
  Event joint_;  // of `order`
};

}  // namespace quern
