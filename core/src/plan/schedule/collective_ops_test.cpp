// Collectives that a program holds itself, in the plans of a model that sums its stream over the ranks.
#include <algorithm>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "plan/rank_plans.h"
#include "plan/schedule/make_schedules.h"
#include "quern/testkit/refusal.h"

using namespace quern;

namespace {

const std::vector<OpSpec> kOps{
    {.kind = std::string(kAllReduce),
     .inputs = {"x"},
     .outputs = {"y"},
     .infer = [](InferContext& c) { c.outputs[0].shape = c.inputs[0]->shape, c.outputs[0].dtype = c.inputs[0]->dtype; },
     .backward =
         [](BackwardContext& b) { b.emit(std::string(kAllReduce), {b.output_grad()}, {0}, b.op().attributes); }}};

/// What its model sums: the stream that the head reads, or the embedding's weight, whose gradient adds up over
/// micro-batches.
enum class Summed { stream, parameter };

class Summing final : public testkit::TinyModel {
 public:
  explicit Summing(Attributes attributes, Summed summed = Summed::stream)
      : attributes_(std::move(attributes)), summed_(summed) {}
  void embed(ProgramBuilder& b) const override {
    if (summed_ == Summed::stream) return TinyModel::embed(b);
    const ValueId weight = sum(b, b.parameter("embedding.weight"));
    b.output(b.op("embedding", {b.tokens(), weight}, "embedded")[0]);
  }
  void head(ProgramBuilder& b) const override {
    ValueId x = b.stream(traits().width);
    if (summed_ == Summed::stream) x = sum(b, x);
    b.output(b.lm_loss(b.rms_norm(x, "final_norm.weight", 1e-6, "normed"), "lm_head.weight"));
  }

 private:
  ValueId sum(ProgramBuilder& b, ValueId x) const {
    return b.op(std::string(kAllReduce), {x}, "summed", attributes_)[0];
  }
  Attributes attributes_;
  Summed summed_;
};

Plan plan_of(const PlanOptions& options, const Attributes& attributes = {}, Summed summed = Summed::stream) {
  PlanningDevice device([](const OpInstance& op) { return OpSupport{op.kind == kAllReduce ? "no kernel" : "", 0}; });
  device.device_traits.alignment = 16;
  return plan_of(Summing(attributes, summed), options, device, testkit::PlainPrecision(DType::bf16), kOps);
}

std::vector<Plan> plans_with(int ranks, bool stored, const Attributes& attributes = {}) {
  std::vector<Plan> plans;
  for (int rank = 0; rank < ranks; ++rank) {
    PlanOptions options = rank_options(ranks, rank, Sharding::ranks, stored_options(stored ? 27 : 0, 1));
    if (stored) options.state.weights.sharding = Sharding::ranks;
    plans.push_back(plan_of(options, attributes));
  }
  return plans;
}

/// Places of the program's own collectives among a run's actions.
std::vector<std::size_t> own_collectives(const Plan& plan, Run run) {
  std::vector<std::size_t> found;
  const std::vector<Action>& actions = plan.schedules[run].actions;
  for (std::size_t i = 0; i < actions.size(); ++i)
    if (actions[i].kind == ActionKind::collective && plan.schedules.task_of(actions[i]).program.starts_with("head"))
      found.push_back(i);
  return found;
}

}  // namespace

TEST_CASE("an op that sums over ranks is a collective of its axis, forward and backward, whose plans keep all rules") {
  for (int ranks : {2, 3})
    for (bool stored : {false, true})
      for (const char* axis : {"", "machine"}) {
        CAPTURE(ranks);
        CAPTURE(stored);
        CAPTURE(axis);
        const Attributes attributes = *axis ? Attributes{{"axis", std::string(axis)}} : Attributes{};
        const std::vector<Plan> plans = plans_with(ranks, stored, attributes);
        for (const Plan& plan : plans) {
          CHECK(own_collectives(plan, Run::evaluate).size() == 1);
          CHECK(own_collectives(plan, Run::later).size() == 2);
          for (const std::size_t i : own_collectives(plan, Run::later)) {
            const Action& action = plan.schedules[Run::later].actions[i];
            CHECK(action.lane == Lane::communication);
            CHECK((plan.schedules.task_of(action).axis == Axis::machine) == (*axis != 0));
          }
        }
        CHECK(faults_of(plans) == std::vector<std::string>{});
      }
}

TEST_CASE("a program's collective that does not wait, is not waited for, or that one rank lacks is refused") {
  std::vector<Plan> plans = plans_with(2, true);
  RunSchedule& schedule = plans[1].schedules[Run::later];
  const RunSchedule right = schedule;
  for (const std::size_t i : own_collectives(plans[1], Run::later)) {
    CAPTURE(i);
    auto without = [&](std::size_t index) {
      schedule = right;
      schedule.actions.erase(schedule.actions.begin() + static_cast<std::ptrdiff_t>(index));
      return faults_of(plans);
    };
    CHECK_FALSE(without(i).empty());
    const auto begin = right.actions.begin();
    const auto before = std::find_if(
        std::make_reverse_iterator(begin + static_cast<std::ptrdiff_t>(i)), right.actions.rend(),
        [](const Action& action) { return action.kind == ActionKind::wait && action.lane == Lane::communication; });
    REQUIRE(before != right.actions.rend());
    CHECK_FALSE(without(static_cast<std::size_t>(before.base() - begin) - 1).empty());
    const auto record = std::find_if(begin + static_cast<std::ptrdiff_t>(i), right.actions.end(), [](const Action& a) {
      return a.kind == ActionKind::record && a.lane == Lane::communication;
    });
    REQUIRE(record != right.actions.end());
    const auto after = std::find_if(record, right.actions.end(), [&](const Action& action) {
      return action.kind == ActionKind::wait && action.event == record->event;
    });
    REQUIRE(after != right.actions.end());
    CHECK_FALSE(without(static_cast<std::size_t>(after - begin)).empty());
  }
  schedule = right;
  const std::size_t task = static_cast<std::size_t>(right.actions[own_collectives(plans[1], Run::later)[0]].task);
  plans[1].schedules.tasks[task].axis = Axis::machine;
  CHECK_FALSE(faults_of(plans).empty());
}

TEST_CASE("a collective of a program is refused where some ranks have fewer micro-batches") {
  PlanOptions options = rank_options(2, 0, Sharding::none, tiny_options());
  options.accumulation = 2;
  CHECK_NOTHROW(plan_of(options));
  options.uneven = true;
  testkit::check_refused(ErrorCode::resources, {"all_reduce", "train.accumulation", "multiple of parallel.ranks"},
                         [&] { plan_of(options); });
}

TEST_CASE("a collective of a program whose result is a gradient that adds up over micro-batches is refused") {
  const PlanOptions options = rank_options(2, 0, Sharding::none, tiny_options());
  testkit::check_refused(ErrorCode::resources, {"all_reduce", "add up over micro-batches"},
                         [&] { plan_of(options, {}, Summed::parameter); });
}

TEST_CASE("a collective of a program is refused where there is one rank, or sums that do not depend on their number") {
  testkit::check_refused(ErrorCode::resources, {"all_reduce", "there is one rank"}, [] { plan_of(tiny_options()); });
  PlanOptions options = rank_options(2, 0, Sharding::none, tiny_options());
  options.gradient = DType::f32;
  options.state.in_tree = 4;
  testkit::check_refused(ErrorCode::resources, {"all_reduce", "depend on the number of ranks"},
                         [&] { plan_of(options); });
}
