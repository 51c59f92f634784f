// Schedules as they are made from the order of programs: which runs there are, what each adds to, and what the host
// does.
#include "plan/schedule/make_schedules.h"

#include <algorithm>
#include <map>

#include <doctest/doctest.h>

#include "plan/test_plans.h"

using namespace quern;

namespace {

std::string name(const Plan& plan, const Access& access) {
  return access.value < 0 ? "" : plan.schedules.values[static_cast<std::size_t>(access.value)];
}

std::vector<std::string> runs_of(const PlanOptions& options) {
  const Plan plan = tiny_plan(options);
  std::vector<std::string> names;
  for (const RunSchedule& schedule : plan.schedules.runs)
    if (!schedule.empty()) names.push_back(schedule.name);
  return names;
}

/// By the name of a written value: whether each action that writes it in the run adds to it, in order.
std::map<std::string, std::vector<bool>> adds(const Plan& plan, Run run) {
  std::map<std::string, std::vector<bool>> found;
  const RunSchedule& schedule = plan.schedules[run];
  for (const Action& action : schedule.actions) {
    if (action.kind != ActionKind::launch) continue;
    const Task& task = plan.schedules.task_of(action);
    for (std::size_t o = 0; o < task.instance.outputs.size(); ++o) {
      const bool sums = std::find(task.summed.begin(), task.summed.end(), static_cast<int>(o)) != task.summed.end();
      CHECK(sums == task.instance.outputs[o].accumulate);
      if (task.instance.outputs[o].present) found[name(plan, schedule.writes(action)[o])].push_back(sums);
    }
  }
  return found;
}

using Names = std::vector<std::string>;
using Adds = std::vector<bool>;

}  // namespace

TEST_CASE("a plan has the runs that its options ask for, under their names") {
  PlanOptions options = tiny_options();
  const Names training{"refresh", "upload", "evaluate", "first micro-step", "later micro-step", "update", "result"};
  CHECK(runs_of(options) == training);
  options.logits = options.next_logits = true;
  options.train = false;
  CHECK(runs_of(options) == Names{"refresh", "upload", "evaluate", "logits", "next logits"});
  options = stored_options(4, 1);
  CHECK(runs_of(options) == Names{"refresh", "upload", "evaluate", "first micro-step", "later micro-step",
                                  "last micro-step", "only micro-step", "first micro-step, updating",
                                  "only micro-step, updating", "update", "apply", "result"});
  options = tiny_options();
  options.observe = true;
  const Names observed = runs_of(options);
  CHECK(std::find(observed.begin(), observed.end(), "first micro-step, observed") != observed.end());
  CHECK(std::find(observed.begin(), observed.end(), "later micro-step, observed") != observed.end());
}

TEST_CASE("the first micro-step writes gradients and losses, and later ones add to them") {
  const Plan plan = tiny_plan(stored_options(4, 1));  // with last and only micro-steps
  for (Run run : {Run::first, Run::only, Run::later, Run::last}) {
    CAPTURE(name_of(run));
    const bool added = run == Run::later || run == Run::last;
    int gradients = 0;
    for (const auto& [value, sums] : adds(plan, run)) {
      CAPTURE(value);
      const bool gradient = value.starts_with("gradient.");
      gradients += gradient ? 1 : 0;
      const bool total = gradient || value == "loss_stats";
      CHECK(sums == Adds{total && added});
    }
    CHECK(gradients == 3 + 2 * 6);
  }
  // An evaluation begins anew each time.
  CHECK(adds(plan, Run::evaluate).at("eval_stats") == Adds{false});
}

TEST_CASE("of a gradient with two producers the first one writes and the second adds, in the same run") {
  const Plan plan = tiny_plan(tiny_options(), PlanningDevice(), testkit::PlainPrecision(DType::bf16), {.tied = true});
  CHECK(adds(plan, Run::first).at("gradient.embedding.weight") == Adds{false, true});
  CHECK(adds(plan, Run::later).at("gradient.embedding.weight") == Adds{true, true});
  // Which the operands know: version 1 by the head, 2 by the embedding.
  std::vector<int> versions;
  const RunSchedule& schedule = plan.schedules[Run::first];
  for (const Access& access : schedule.operands)
    if (name(plan, access) == "gradient.embedding.weight") versions.push_back(access.version);
  CHECK(versions == std::vector<int>{1, 2});
}

TEST_CASE("tasks of layers that are alike are shared, and named for people") {
  const Plan plan = tiny_plan(tiny_options(), PlanningDevice(), testkit::PlainPrecision(DType::bf16), {.layers = 5});
  const RunSchedule& schedule = plan.schedules[Run::first];
  std::map<std::int32_t, Names> qkv;  // by task, what it makes
  for (const Action& action : schedule.actions)
    if (plan.schedules.task_of(action).name == "matmul qkv")
      qkv[action.task].push_back(name(plan, schedule.writes(action)[0]));
  REQUIRE(qkv.size() == 2);  // of the first block, which has nothing to add, and of the others
  CHECK(qkv.begin()->second == Names{"qkv@0"});
  CHECK(qkv.rbegin()->second == Names{"qkv@1", "qkv@2", "qkv@3", "qkv@4"});
  const Task& task = plan.schedules.tasks[static_cast<std::size_t>(qkv.rbegin()->first)];
  CHECK(task.program == "block.forward");
  CHECK(task.phase == Phase::forward);
  CHECK(task.cost.flops > 0);
}

TEST_CASE("windows number the programs of a run") {
  const Plan plan = tiny_plan(tiny_options());
  for (Run run : {Run::first, Run::evaluate, Run::refresh}) {
    CAPTURE(name_of(run));
    std::int32_t last = -1;
    for (const Action& action : plan.schedules[run].actions) {
      CHECK(action.window >= last);
      CHECK(action.window <= last + (run == Run::refresh ? 100 : 1));  // of some parameters nothing is refreshed
      last = action.window;
    }
  }
  CHECK(plan.schedules[Run::first].actions.back().window == 2 * 2 + 2);  // embed, layers, head, and back
}

TEST_CASE("an upload is written by the host, then copied tensor by tensor") {
  PlanOptions options = tiny_options();
  options.documents = true;
  const Plan plan = tiny_plan(options);
  const RunSchedule& schedule = plan.schedules[Run::upload];
  REQUIRE(schedule.actions.size() == 6);
  CHECK(schedule.actions[0].kind == ActionKind::host);
  CHECK(schedule.actions[0].lane == Lane::host);
  std::int64_t offset = 0;
  for (std::size_t i = 0; i < 5; ++i) {
    const Action& copy = schedule.actions[i + 1];
    const Access &from = schedule.reads(copy)[0], &to = schedule.writes(copy)[0];
    CHECK(copy.kind == ActionKind::copy);
    CHECK(from == schedule.writes(schedule.actions[0])[i]);
    CHECK(from.place == Place{Space::staging, 0, offset, to.place.bytes});
    CHECK(name(plan, from) == "staged " + plan.uploaded[i].name);
    CHECK(to.place == plan.tensor({plan.uploaded[i].name}).place());
    offset += to.place.bytes;
  }
  CHECK(offset == plan.staging_slot_bytes);
}

TEST_CASE("a result is copied, awaited by the host and read") {
  const Plan plan = tiny_plan(tiny_options());
  const RunSchedule& schedule = plan.schedules[Run::result];
  std::vector<ActionKind> kinds;
  for (const Action& action : schedule.actions) kinds.push_back(action.kind);
  CHECK(kinds == std::vector<ActionKind>{ActionKind::copy, ActionKind::copy, ActionKind::record, ActionKind::wait,
                                         ActionKind::host});
  CHECK(schedule.actions[3].lane == Lane::host);
  CHECK(name(plan, schedule.reads(schedule.actions[0])[0]) == "loss_stats");
  CHECK(name(plan, schedule.reads(schedule.actions[1])[0]) == "update");
  CHECK(schedule.reads(schedule.actions[4]).size() == 2);
}

TEST_CASE("tensors outlive runs, and those that are written before the first one are held") {
  PlanOptions options = tiny_options();
  options.next_logits = true;
  const Plan plan = tiny_plan(options);
  const ScheduleSet& set = plan.schedules;
  REQUIRE(set.lasting.size() == set.values.size());
  std::map<std::string, int> held;
  for (const Access& access : set.held) {
    CHECK(set.lasting[static_cast<std::size_t>(access.value)]);
    ++held[name(plan, access).substr(0, name(plan, access).find('.'))];
  }
  const int tensors = 3 + 2 * 6;
  CHECK(held ==
        std::map<std::string, int>{{"master", tensors}, {"moment1", tensors}, {"moment2", tensors}, {"rows", 1}});
  const auto lasting = std::count(set.lasting.begin(), set.lasting.end(), true);
  CHECK(lasting == std::count_if(plan.tensors.begin(), plan.tensors.end(),
                                 [](const PlannedTensor& tensor) { return tensor.owner != TensorOwner::activation; }));
}
