// The time of a step, and what of it the kernels wait.
#include "plan/time/step_time.h"

#include <set>

#include <doctest/doctest.h>

#include "plan/report.h"
#include "plan/show_schedules.h"
#include "plan/test_plans.h"
#include "plan/time/simulate.h"

using namespace quern;

namespace {

double unhidden(const StepTime& step) {
  double seconds = 0;
  for (const auto& [owner, time] : step.unhidden) seconds += time;
  return seconds;
}

}  // namespace

TEST_CASE("a step is its micro-steps and the update, of which nothing waits where all is on the device") {
  const PlanningDevice device;
  const DeviceTraits& traits = device.traits();
  const Plan plan = tiny_plan(tiny_options());
  auto of = [&](Run run) { return simulated_seconds(plan.schedules, plan.schedules[run], traits); };
  for (std::int64_t count : {1, 2, 3, 9}) {
    const StepTime step = simulated_step(plan, traits, count);
    CHECK(step.total ==
          doctest::Approx(of(Run::first) + static_cast<double>(count - 1) * of(Run::later) + of(Run::update)));
    CHECK(step.unhidden.empty());
  }
}

TEST_CASE("waits are counted by owner: all that a slow link brings, and next to nothing behind a fast one") {
  const Plan plan = tiny_plan(stored_options(15, 1));
  DeviceTraits device = PlanningDevice().traits();
  device.host_rate = 1e3;
  const StepTime slow = simulated_step(plan, device, 3);
  CHECK(slow.unhidden.size() == 4);
  CHECK(unhidden(slow) > 0.9 * slow.total);
  CHECK(unhidden(slow) <= slow.total);
  device.host_rate = 1e15;
  const StepTime fast = simulated_step(plan, device, 3);
  CHECK(unhidden(fast) < 0.01 * fast.total);
}

TEST_CASE("kernels that work in a store wait for its link beyond their own time") {
  const Plan plan = tiny_plan(stored_options(15, 1), PlanningDevice(), testkit::PlainPrecision(DType::bf16), {},
                              {{.id = "host", .mappable = true}});
  DeviceTraits device = PlanningDevice().traits();
  device.host_rate = 1e3;
  const StepTime slow = simulated_step(plan, device, 3);
  CHECK(unhidden(slow) > 0.9 * slow.total);
  CHECK(unhidden(slow) < slow.total);
  device.host_rate = 1e15;
  CHECK(unhidden(simulated_step(plan, device, 3)) == 0);
}

TEST_CASE("a step's runs are as many as its micro-batches and the update, each kind once") {
  for (const bool stored : {false, true}) {
    const Plan plan = tiny_plan(stored ? stored_options(15, 1) : tiny_options());
    for (std::int64_t micro_batches : {1, 2, 3, 8}) {
      std::int64_t count = 0;
      std::set<Run> kinds;
      for (const auto& [run, times] : runs_of_step(plan, micro_batches)) {
        CHECK(kinds.insert(run).second);
        count += times;
      }
      CHECK(count == micro_batches + 1);
    }
  }
}

TEST_CASE("waits of a run are separate, where no kernel runs, and the timeline shows them") {
  const Plan plan = tiny_plan(stored_options(15, 1));
  const DeviceTraits device = PlanningDevice().traits();
  const RunSchedule& schedule = plan.schedules[Run::later];
  const std::vector<ActionTime> times = simulate(plan.schedules, schedule, device);
  const std::vector<StoreWait> waits = store_waits(plan, schedule, times);
  REQUIRE(!waits.empty());
  for (std::size_t i = 0; i < waits.size(); ++i) {
    const ActionTime& wait = waits[i].time;
    CHECK(wait.end > wait.begin);
    if (i > 0) CHECK(wait.begin >= waits[i - 1].time.end);
    for (std::size_t action = 0; action < times.size(); ++action)
      if (schedule.actions[action].lane == Lane::compute)
        CHECK((times[action].end <= wait.begin || times[action].begin >= wait.end));
  }
  std::size_t shown = 0;
  for (const TimelineEvent& event : simulated_timeline(plan, device)) {
    shown += event.name.starts_with("wait for ");
    if (event.lane == Lane::copy_in && event.run == schedule.name)
      CHECK((event.name.starts_with("fetch ") && event.name != "fetch "));
  }
  CHECK(shown >= waits.size());
  CHECK(waits_text(simulated_step(plan, device, 2)).find(" for ") != std::string::npos);
  CHECK(waits_text(StepTime{}).empty());
}

TEST_CASE("each reason for slow ops is given once, with its cost in a step, whatever the op and the layer") {
  auto slow = [](const OpInstance& op) {
    OpSupport support{.seconds = 1};
    if (op.kind.starts_with("attention")) support.slow = "attention by hand", support.fast_seconds = 0.25;
    if (op.kind == "swiglu") support.slow = "no fused kernel", support.fast_seconds = 0.5;
    return support;
  };
  PlanningDevice device(slow);
  const Plan plan = tiny_plan(tiny_options(), device);
  const StepTime step = simulated_step(plan, device.traits(), 3);
  REQUIRE(step.slow.size() == 2);
  const auto& [seconds, fast] = step.slow.at("attention by hand");
  CHECK(seconds == 2.0 * plan.model.layers * 3);  // forward and gradient
  CHECK(fast == seconds / 4);
  const std::vector<std::string> texts = slow_texts(step);
  REQUIRE(texts.size() == 2);
  CHECK(texts[0].starts_with("attention by hand: about "));
  CHECK(texts[0].find(" of a step (") != std::string::npos);
  const std::string report = plan_report(plan, device.traits(), 3);
  std::size_t told = 0;
  for (std::size_t at = report.find("\nslow "); at != std::string::npos; at = report.find("\nslow ", at + 1)) ++told;
  CHECK(told == 2);
  CHECK(slow_texts(simulated_step(tiny_plan(tiny_options()), device.traits(), 3)).empty());
}
