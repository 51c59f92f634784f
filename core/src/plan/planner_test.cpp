// The memory of plans: places, sizes, and refusals.
#include "plan/planner.h"

#include <algorithm>
#include <map>

#include <doctest/doctest.h>

#include "plan/laws/check_schedules.h"
#include "plan/test_plans.h"
#include "plan/time/simulate.h"
#include "quern/error.h"
#include "quern/numeric.h"
#include "quern/step_state.h"
#include "quern/testkit/refusal.h"

using namespace quern;

namespace {

constexpr std::int64_t kAlignment = 256;

std::int64_t aligned(std::int64_t bytes) { return rounded_up(bytes, kAlignment); }

/// A compute weight that is the master itself.
bool is_alias(const Plan& plan, const PlannedTensor& tensor) {
  return tensor.owner == TensorOwner::working &&
         tensor.place() == plan.tensor({"master", tensor.parameter, tensor.layer}).place();
}

struct Range {
  std::int64_t begin = 0, bytes = 0;
  std::string what = {};
};

/// Everything that has a place of its own on the device, -1, or in a store.
std::vector<Range> ranges_of(const Plan& plan, std::int32_t store) {
  std::vector<Range> ranges;
  for (const PlannedTensor& tensor : plan.tensors)
    if (tensor.store == store && !is_alias(plan, tensor))
      ranges.push_back({tensor.offset, tensor.bytes(), tensor.kind + " " + tensor.parameter});
  if (store >= 0) return ranges;
  const std::int64_t transient_end = plan.ring.bytes > 0 ? plan.ring.offset : plan.device_bytes;
  ranges.push_back({plan.transient_offset, transient_end - plan.transient_offset, "transient"});
  if (plan.ring.bytes > 0) ranges.push_back({plan.ring.offset, plan.ring.bytes, "slots"});
  return ranges;
}

/// Bytes by owner, of one store, or of a kind of memory with store -1.
std::int64_t owned(const Plan& plan, MemoryKind memory, std::int32_t store = -1) {
  std::int64_t bytes = 0;
  for (const OwnerBytes& owner : plan.owners)
    if (owner.store == store && (store >= 0 || owner.memory == memory)) bytes += owner.bytes;
  return bytes;
}

std::int64_t owned(const Plan& plan, const std::string& name) {
  auto it =
      std::find_if(plan.owners.begin(), plan.owners.end(), [&](const auto& owner) { return owner.owner == name; });
  return it == plan.owners.end() ? 0 : it->bytes;
}

void check_memory(const Plan& plan, std::int32_t store, std::int64_t bytes) {
  CAPTURE(store);
  std::vector<Range> ranges = ranges_of(plan, store);
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  std::int64_t end = 0;
  for (const Range& range : ranges) {
    CAPTURE(range.what);
    CHECK(range.begin % kAlignment == 0);
    CHECK(range.begin == end);  // nothing overlaps, and nothing is left between
    end = range.begin + aligned(range.bytes);
  }
  CHECK(end == bytes);
  CHECK(owned(plan, MemoryKind::device, store) == bytes);
}

}  // namespace

TEST_CASE("no two things of a plan share a byte, and what they take is the whole, by owner too") {
  const testkit::TinyModelOptions forms[] = {{.layers = 3}, {.tied = true, .bias = true}, {.layer_norm = true}};
  for (unsigned places = 0; places < 32; ++places)
    for (DType dtype : {DType::f32, DType::bf16})
      for (bool train : {true, false}) {
        CAPTURE(places);
        CAPTURE(train);
        PlanOptions options = stored_options(places, 1 + static_cast<int>(places % 3));
        options.train = train;
        options.observe = options.next_logits = places % 2 == 0;
        options.documents = options.logits = options.snapshot = places % 4 < 2;
        const Plan plan =
            tiny_plan(options, PlanningDevice(), testkit::PlainPrecision(dtype), forms[places % std::size(forms)]);
        check_memory(plan, -1, plan.device_bytes);
        for (std::size_t store = 0; store < plan.stores.size(); ++store)
          check_memory(plan, static_cast<std::int32_t>(store), plan.stores[store].bytes);
        CHECK(owned(plan, MemoryKind::pinned) == plan.pinned_bytes + plan.snapshot_bytes);
        CHECK((owned(plan, "gradients") > 0) == train);
        CHECK((owned(plan, "optimizer state") > 0) == train);
      }
}

TEST_CASE("each kind of state is in the memory that the options name") {
  PlanOptions options = tiny_options();
  options.state.master.memory = "one";
  options.state.moments.memory = "two";
  options.state.gradients.memory = "one";
  const Plan plan = tiny_plan(options);
  REQUIRE(plan.stores.size() == 2);
  CHECK(plan.stores[0].id == "one");
  CHECK(plan.stores[1].id == "two");
  for (const PlannedTensor& tensor : plan.tensors) {
    const bool first = tensor.owner == TensorOwner::master || tensor.owner == TensorOwner::gradient;
    CHECK(tensor.store == (first ? 0 : tensor.owner == TensorOwner::optimizer ? 1 : -1));
  }
}

TEST_CASE("a master in the working dtype is its own compute weight, of a tied embedding too") {
  for (bool tied : {false, true})
    for (DType dtype : {DType::f32, DType::bf16}) {
      CAPTURE(tied);
      PlanOptions options = tiny_options();
      const Plan plan = tiny_plan(options, PlanningDevice(), testkit::PlainPrecision(dtype), {.tied = tied});
      CHECK((plan.find({"master", "lm_head.weight"}) == nullptr) == tied);
      const bool same = dtype == DType::f32;
      for (const PlannedTensor& tensor : plan.tensors)
        if (tensor.owner == TensorOwner::working) CHECK(is_alias(plan, tensor) == same);
      CHECK((owned(plan, "compute weights") == 0) == same);
      CHECK(plan.schedules[Run::refresh].empty() == same);
    }
}

TEST_CASE("pinned memory has a slot for each upload, one for results, and a copy of what checkpoints hold") {
  PlanOptions options = tiny_options();
  constexpr std::int64_t kResults = sizeof(LossStats) + sizeof(UpdateState);
  Plan plan = tiny_plan(options);
  CHECK(plan.staging_slot_bytes == 3 * 16 * 4 + std::int64_t{sizeof(StepState)});
  CHECK(plan.pinned_bytes == 4 * plan.staging_slot_bytes + kResults);
  CHECK(plan.snapshot_bytes == 0);
  options.documents = options.snapshot = true;
  options.uploads = 2;
  plan = tiny_plan(options);
  CHECK(plan.staging_slot_bytes == 3 * 16 * 4 + 17 * 4 + std::int64_t{sizeof(StepState)});
  CHECK(plan.pinned_bytes == 2 * plan.staging_slot_bytes + kResults);
  std::int64_t state = 0;
  for (const PlannedTensor& tensor : plan.tensors)
    if (tensor.owner == TensorOwner::master || tensor.owner == TensorOwner::optimizer) state += tensor.bytes();
  CHECK(plan.snapshot_bytes == state);
}

TEST_CASE("slots hold the widest windows that follow each other, and more the further they come ahead") {
  CHECK(tiny_plan(tiny_options()).ring.bytes == 0);
  std::int64_t before = 0;
  for (int ahead : {1, 2, 3}) {
    const Plan plan = tiny_plan(stored_options(15, ahead));
    CHECK(owned(plan, "slots") == plan.ring.bytes);
    // An update of a layer: master, gradient, two moments and the working copy of each tensor.
    std::map<int, std::int64_t> layers;
    for (const PlannedTensor& tensor : plan.tensors)
      if (tensor.store >= 0) layers[tensor.layer] += aligned(tensor.bytes());
    CHECK(plan.ring.bytes > layers[0] + layers[1]);
    CHECK(plan.ring.bytes >= before);
    before = plan.ring.bytes;
  }
  PlanOptions options = stored_options(15, 1);
  options.update_window_bytes = 1024;
  CHECK(tiny_plan(options).ring.bytes < tiny_plan(stored_options(15, 1)).ring.bytes);
}

TEST_CASE("tensors in place need no slots, and their update no windows") {
  const std::vector<OffloadTraits> stores{{.id = "mapped", .mappable = true}};
  PlanOptions options = stored_options(15, 1, "mapped");
  auto plan = [&] { return tiny_plan(options, PlanningDevice(), testkit::PlainPrecision(DType::bf16), {}, stores); };
  CHECK(plan().ring.bytes == 0);
  CHECK(owned(plan(), "slots") == 0);
  CHECK(plan().updates.size() == 1);
  options.state.moments.memory = "host";
  CHECK(plan().ring.bytes > 0);
  CHECK(plan().defers_update());
}

TEST_CASE(
    "three stores at once, of which one has little room and one is slow, are planned and simulated by own figures") {
  PlanningDevice device;
  PlanOptions options = tiny_options();
  options.state.master.memory = "slow";
  options.state.moments.memory = "small";
  options.state.activations.memory = "host";
  options.snapshot = true;
  std::vector<OffloadTraits> stores{
      {.id = "host", .in_host_memory = true}, {.id = "slow", .put_rate = 1e6, .get_rate = 2e6}, {.id = "small"}};
  auto make = [&] { return tiny_plan(options, device, testkit::PlainPrecision(DType::bf16), {}, stores); };
  const Plan plan = make();
  std::map<std::string, std::int64_t> kept;
  for (const PlannedTensor& tensor : plan.tensors)
    if (tensor.store >= 0) kept[plan.stores[static_cast<std::size_t>(tensor.store)].id] += aligned(tensor.bytes());
  REQUIRE(plan.stores.size() == 3);
  for (const StorePlan& store : plan.stores) CHECK(store.bytes == kept[store.id]);
  CHECK(plan.host_bytes() == plan.pinned_bytes + plan.snapshot_bytes + kept["host"]);
  CHECK(plan.disk_bytes() == kept["slow"] + kept["small"]);
  stores[2].capacity = static_cast<std::size_t>(kept["small"]);
  CHECK(make().device_bytes == plan.device_bytes);
  --stores[2].capacity;
  testkit::check_refused(ErrorCode::resources, {"store small: the run does not fit"}, [&] { make(); });

  std::map<std::string, int> moved;
  for (const RunSchedule& run : plan.schedules.runs) {
    const std::vector<ActionTime> times = simulate(plan.schedules, run, device.traits());
    for (std::size_t i = 0; i < times.size(); ++i) {
      const Action& action = run.actions[i];
      const bool gets = action.kind == ActionKind::get;
      if (!gets && action.kind != ActionKind::put) continue;
      const Place& home = (gets ? run.reads(action) : run.writes(action))[0].place;
      const std::string& id = plan.stores[static_cast<std::size_t>(home.index)].id;
      const auto bytes = static_cast<double>(home.bytes);
      const double seconds = times[i].end - times[i].begin;
      CAPTURE(id);
      if (id == "slow") {
        CHECK(seconds == doctest::Approx(bytes / (gets ? 2e6 : 1e6)));
      } else {  // the link's, or a share of it
        CHECK(seconds > bytes / device.traits().host_rate * 0.999);
        CHECK(seconds < bytes / 2e6);
      }
      ++moved[id];
    }
  }
  CHECK(moved.size() == 3);
}

TEST_CASE("the windows of an update have each element once, and are small where rows can be updated apart") {
  PlanOptions options = stored_options(15, 1);
  for (std::int64_t bytes : {256, 2048, 1 << 20}) {
    CAPTURE(bytes);
    options.update_window_bytes = bytes;
    const Plan plan = tiny_plan(options, PlanningDevice(), testkit::PlainPrecision(DType::bf16), {.vocabulary = 1031});
    std::map<std::pair<std::size_t, int>, std::int64_t> rows;
    for (const UpdateWindow& window : plan.updates)
      for (const UpdatePart& part : window.parts) {
        std::int64_t& next = rows[{part.parameter, part.layer}];
        CHECK(next == part.rows.begin);
        const std::int64_t all = plan.parameters[part.parameter].spec.extents[0];
        next = part.rows.whole() ? all : part.rows.end;
        CHECK((part.rows.whole() || part.rows.of == all));
        CHECK((part.rows.whole() || window.parts.size() == 1));
      }
    std::size_t tensors = 0;
    for (std::size_t i = 0; i < plan.parameters.size(); ++i)
      for_each_layer(plan.parameters[i].spec, static_cast<int>(plan.model.layers), [&](int layer) {
        ++tensors;
        CHECK(rows[{i, layer}] == plan.parameters[i].spec.extents[0]);
      });
    CHECK(rows.size() == tensors);
    CHECK(plan.updates.size() > (bytes < 1 << 20 ? tensors : 0));
    CHECK(schedule_faults(plan) == std::vector<std::string>{});
  }
}

TEST_CASE("the head makes as many logits at once as the options name, in training and in evaluation") {
  for (const std::int64_t chunk : {0, 4}) {
    PlanOptions options = tiny_options();
    options.loss_chunk = chunk;
    const Plan plan = tiny_plan(options);
    int losses = 0;
    for (const PlacedProgram* placed : {&plan.head_train, &plan.head_evaluate})
      for (const Op& op : placed->program.ops)
        if (plan.ops.at(op.kind).product == Product::loss) {
          ++losses;
          CHECK(op.attributes.integer_or("chunk", 0) == chunk);
        }
    CHECK(losses == 2);
  }
}

TEST_CASE("a launch has the workspace that the hungriest form of its op needs") {
  // Adding to a gradient takes more than writing it.
  const PlanningDevice device([](const OpInstance& op) {
    if (op.kind != "matmul") return OpSupport{};
    return OpSupport{.workspace_bytes = op.outputs[0].accumulate ? 4096u : 512u};
  });
  const Plan plan = tiny_plan(tiny_options(), device);
  for (Run run : {Run::first, Run::later}) {
    int gradients = 0;
    const RunSchedule& schedule = plan.schedules[run];
    for (const Action& action : schedule.actions) {
      const Task& task = plan.schedules.task_of(action);
      if (task.instance.kind != "matmul") continue;
      const Place& workspace = schedule.writes(action).back().place;
      const bool gradient = task.name.find(".weight") != std::string::npos;
      gradients += gradient ? 1 : 0;
      CHECK(workspace.bytes == (gradient ? 4096 : 512));
      CHECK(workspace.offset >= plan.transient_offset);
    }
    CHECK(gradients >= 8);
  }
}

TEST_CASE("all that a device refuses is listed at once, and what to do about it") {
  const PlanningDevice device([](const OpInstance& op) {
    if (op.kind == "attention") return OpSupport{.refusal = "no heads of 4"};
    if (op.kind == "swiglu") return OpSupport{.refusal = "no bf16"};
    return OpSupport{};
  });
  auto message = [&](bool documents) {
    PlanOptions options = tiny_options();
    options.documents = documents;
    return testkit::refusal(ErrorCode::resources, [&] { tiny_plan(options, device); });
  };
  CHECK(
      message(false) ==
      "device planning: cannot run this model:\n  attention: no heads of 4\n  swiglu: no bf16; choose another device, "
      "precision or model");
  CHECK(message(true).ends_with("or data.documents = \"joined\" if it refuses attention"));
}

TEST_CASE("kernels that keep scratch of their own are known to the plan and to its tasks") {
  const PlanningDevice device([](const OpInstance& op) { return OpSupport{.concurrent = op.kind != "attention"}; });
  const Plan plan = tiny_plan(tiny_options(), device);
  CHECK(plan.exclusive == std::set<std::string>{"attention"});
  for (const Task& task : plan.schedules.tasks) CHECK(task.exclusive == (task.instance.kind == "attention"));
}
