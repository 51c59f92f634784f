#pragma once
// Runs a plan on a device: prepares every kernel, allocates the one arena, binds every operand, and then only launches.
// Nothing is allocated, looked up or decided inside a step.

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plan/plan.h"
#include "plan/time/simulate.h"
#include "quern/communicator.h"
#include "quern/data_source.h"
#include "quern/device.h"
#include "quern/offload.h"
#include "quern/step_state.h"

namespace quern {

class Progress;

/// Whether a step tells what the scales of its tensors lose.
enum class Observe : bool { no, yes };
/// Which weights the engine has: those that training moves, or what the optimizer evaluates in their place.
enum class Weights : std::uint8_t { trained, evaluated };
/// The place of a micro-step among those that this rank makes of a step. Behind the last one gradients are final.
struct At {
  bool first = true, last = true;
};

class Engine {
 public:
  /// `device` must be open. `stores` are Plan::stores, by index, open. All outlive the engine. Throws a
  /// resources error when memory cannot be had.
  Engine(Device& device, Plan plan, std::vector<OffloadStore*> stores = {});
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const Plan& plan() const { return plan_; }
  /// Seconds of the host so far, in work that later steps do not repeat.
  struct Spent {
    double kernels = 0;  ///< preparing them, timing included
    double memory = 0;   ///< allocating it, and binding operands to it
    double graphs = 0;   ///< capturing them
  };
  const Spent& spent() const { return spent_; }

  // ---- tensors: host copies, blocking; a fault of a store by then is a resources error ----
  /// Of a tensor that is split over ranks `host` is the whole. Reading one is collective, and only what a rank asks
  /// for, with a host that is not null, is copied to it.
  void write(const PlannedTensor& tensor, const void* host) {
    write(tensor, 0, element_count(tensor.whole_extents()), host);
  }
  void read(const PlannedTensor& tensor, void* host) { read(tensor, 0, element_count(tensor.whole_extents()), host); }
  /// `count` elements from `first` on.
  void write(const PlannedTensor& tensor, std::int64_t first, std::int64_t count, const void* host);
  void read(const PlannedTensor& tensor, std::int64_t first, std::int64_t count, void* host);
  /// Of what this rank has; not collective.
  void read_part(const StatePart& part, void* host);
  /// Where the tensor's elements are once this returns; null: in a store, or in slots.
  void* device_address(const PlannedTensor& tensor);
  /// All of them, one behind the other.
  void read(const std::vector<PlannedTensor>& tensors, std::byte* host);
  /// Makes the working copies from the masters; after masters were written.
  void refresh();
  /// Makes the forms of frozen weights that ops read: before `refresh`, and needed once. Calls `supply`, which writes
  /// it, for each master that is there for this alone.
  void load(const std::function<void(const PlannedTensor& master)>& supply);

  /// Called before each read of a tensor that is split over ranks, so that the other ranks join in. What it returns is
  /// kept until the read is done.
  using ReadNotice =
      std::function<std::shared_ptr<void>(const PlannedTensor& tensor, std::int64_t first, std::int64_t count)>;
  void announce_reads(ReadNotice notice) { notice_ = std::move(notice); }

  // ---- training: enqueued, not awaited ----
  /// Forward and backward of one micro-batch; the first of a step overwrites gradients and statistics, others add.
  /// Waits for the device when options.uploads micro-batches are on their way. Observe::yes, for all micro-batches of a
  /// step, needs options.observe.
  void micro_step(const Batch& batch, const StepState& state, At at = {}, Observe observe = Observe::no);
  /// Observes the working copies of weights that the last micro-steps read; before the update. Needs options.observe.
  void observe_weights();
  /// Makes the arena known to other ranks, as many as the plan has, of all machines; `machine` is for what the ranks of
  /// one do alone, null if there is one. Before anything that is collective: refresh, apply_update, read, the first and
  /// the last micro-step of a step, update. The communicators outlive the engine.
  void join(Communicator& communicator, Communicator* machine = nullptr);
  /// Turns the collectives of runs into no-ops, to measure step time without communication. Results are wrong.
  void skip_transfers();
  /// Ends what join began, collectively, when nothing is pending; an engine destroyed without it leaves its memory to
  /// other ranks.
  void leave();
  /// How far the streams are among what ranks do together; null before join, and for a group of one.
  std::shared_ptr<const Progress> progress() const { return progress_; }
  /// Gradient norm, optimizer and working copies, under the state that came with the last micro-batch. Of a plan that
  /// defers its update only the norm; the rest, and the gather of what other ranks updated, is part of the next
  /// micro-step.
  void update();
  /// Does now what the update deferred, before anything but a step reads or writes state. With several ranks it is
  /// collective, and blocks; one rank does it by itself where it is needed.
  void apply_update();
  /// Does `work` with those weights in the masters' place; collective like apply_update. They are the same, and this
  /// costs nothing, unless the optimizer has states that are evaluated (OptimizerState::evaluated). May be nested.
  void with(Weights weights, const std::function<void()>& work);
  /// False once an update was enqueued in part only: what it should have changed is then nothing that can be saved.
  bool whole() const { return update_ != Update::halfway; }

  // ---- results: blocking; errors as for tensors ----
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

  /// The runs of a step of so many micro-batches, an accumulating micro-step and what the update puts off: one run
  /// behind the other, action by action with an event around each. By run, the times of its actions, of those that
  /// take some on a stream; a wait of the compute lane ends where it begins, when it is over.
  std::map<Run, std::vector<ActionTime>> profile(const Batch& batch, const StepState& state,
                                                 std::int64_t micro_batches);

 private:
  enum class Update : std::uint8_t { applied, deferred, halfway };
  /// An action with addresses.
  struct Bound {
    const Kernel* kernel = nullptr;     ///< of a launch
    std::vector<View> inputs, outputs;  ///< of a launch or collective, where neighbours are one
    std::vector<std::int64_t> counts;   ///< of a collective: elements of each rank's part
    void* workspace = nullptr;
    std::size_t number = 0;  ///< of a collective: in its run
    bool closes = false;     ///< of a collective: no other one follows at once on its lane
    bool awaits = false;     ///< a wait of the compute lane for collectives
  };
  /// A range of actions; see make_segments.
  struct Segment {
    std::size_t begin = 0, end = 0;
    bool captured = false;
    std::unique_ptr<Graph> graph = nullptr;  ///< made by the first use, where it is captured
  };
  struct BoundRun {
    std::vector<Bound> actions;
    std::vector<Segment> segments;
    std::vector<Event> events;
    std::vector<Lane> side_lanes;  ///< used beside compute, where the whole run is one segment
  };

  std::vector<ActionTime> profile(const Run& run, std::vector<Event>& events);
  void prepare_kernels();
  void bind(const RunSchedule& schedule);
  void bind_collective(const Action& action, Bound& bound) const;
  static void mark_collectives(const RunSchedule& schedule, BoundRun& bound);
  const Kernel* kernel_for(const OpInstance& instance);
  View view_of(const Access& access, const Operand& operand) const;
  std::byte* address(const Place& place) const;
  Stream stream(Lane lane);
  bool can_capture(const RunSchedule& schedule, const Action& action) const;
  void drop_graphs();
  void make_segments(const RunSchedule& schedule, BoundRun& bound) const;
  /// Lets the first of these lanes go on only when the second is where it is now.
  void order(Lane later, Lane earlier);
  void wait(Lane lane, Event event, bool awaits_collectives);
  void synchronize();
  void put(const Place& stored, const std::byte* from, Stream stream);
  void get(const Place& stored, std::byte* to, Stream stream);
  void move(const Place& place, std::byte* to, const std::byte* from);
  void read_shards(const PlannedTensor& tensor, std::int64_t first, std::int64_t count, std::byte* host);
  std::vector<float> read_floats(const PlannedTensor& tensor);
  void enqueue_read(const PlannedTensor& tensor, std::int64_t first, std::int64_t count,
                    std::byte* host);  // on compute
  void run(const Run& run, const std::function<void()>& host = {});
  void run_segment(const RunSchedule& schedule, BoundRun& bound, Segment& segment, const std::function<void()>& host);
  void act(const RunSchedule& schedule, BoundRun& bound, std::size_t index, const std::function<void()>& host);
  void exchange();
  /// One that changes state, which is not whole if that throws.
  void run_update(const Run& run, Update then);
  /// Throws what a store met while the streams ran, as a resources error.
  void check_stores() const;
  /// Applies it where this rank may do so alone; or only if that changes the tensor.
  void need_applied();
  void need_applied(const PlannedTensor& tensor);
  void collect(const Task& task, const Bound& bound, Stream stream);
  void call_communicator(const Task& task, const Bound& bound, Stream stream);
  void upload(const Batch& batch, const StepState& state);

  Device& device_;
  Plan plan_;
  Stream compute_;
  Communicator* communicator_ = nullptr;              // of all ranks
  std::array<Communicator*, kAxes> communicators_{};  // by axis
  bool transfers_ = true;
  std::shared_ptr<Progress> progress_;  // shared with who watches it for longer
  ReadNotice notice_;
  Update update_ = Update::applied;  // of the last step
  Weights weights_ = Weights::trained;
  std::vector<OffloadStore*> stores_;
  std::vector<OffloadSlot> store_slots_;  // one a store, of all that the plan keeps there
  std::vector<std::byte*> store_memory_;  // by store, where kernels work in place; else null
  std::byte* arena_ = nullptr;
  std::byte* staging_ = nullptr;  // pinned: a slot for each upload, one for results
  std::byte* slot_ = nullptr;     // the next upload's
  Spent spent_;
  int next_slot_ = 0, on_their_way_ = 0;  // uploads that may not be done
  std::map<std::string, std::vector<std::pair<OpInstance, std::unique_ptr<Kernel>>>> kernels_;
  std::vector<const Kernel*> kernel_of_task_;
  std::map<const RunSchedule*, BoundRun> bound_;  // of plan_
  Event joint_;                                   // of `order`
};

}  // namespace quern
