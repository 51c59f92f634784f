// The order of programs: streams meet, and each run has the programs of its kind.
#include "plan/schedule/order.h"

#include <doctest/doctest.h>

using namespace quern;

namespace {

Plan plan_of(int layers, bool observe) {
  Plan plan;
  plan.model.layers = layers;
  plan.options.next_logits = true;
  plan.options.observe = observe;
  plan.classes.resize(1);
  plan.class_of_layer.assign(static_cast<std::size_t>(layers), 0);
  return plan;
}

}  // namespace

TEST_CASE("a micro-step goes forward through all layers, turns at the head and comes back") {
  for (int layers : {1, 2, 7}) {
    const Plan plan = plan_of(layers, false);
    for (Run run : {Run::first, Run::later}) {
      const std::vector<Stop> order = order_of(plan, run);
      REQUIRE(order.size() == static_cast<std::size_t>(2 * layers + 3));
      for (std::size_t i = 1; i < order.size(); ++i) CHECK(order[i].boundary_in == order[i - 1].boundary_out);
      const Stop& turn = order[static_cast<std::size_t>(layers + 1)];
      CHECK(turn.flow == Stop::Flow::turn);
      CHECK(turn.program == &plan.head_train);
      CHECK(turn.boundary_in == turn.boundary_out);
      CHECK(order[1].layer == 0);
      CHECK(order[order.size() - 2].layer == 0);
      CHECK(order.back().program == &plan.embed_backward);
      CHECK(order.back().boundary_out == -1);
    }
  }
}

TEST_CASE("an evaluation ends at the head, whose result is a tensor where logits are asked for") {
  const Plan plan = plan_of(3, false);
  CHECK(order_of(plan, Run::evaluate).back().program == &plan.head_evaluate);
  CHECK(order_of(plan, Run::evaluate).back().result == "");
  CHECK(order_of(plan, Run::next_logits).back().result == "next_logits");
  CHECK(order_of(plan, Run::logits).empty());  // not asked for
  for (const Stop& stop : order_of(plan, Run::evaluate)) CHECK(stop.flow == Stop::Flow::evaluate);
}

TEST_CASE("only plans that observe, and only those that train, have the runs for it") {
  CHECK(order_of(plan_of(2, false), Run::observed_first).empty());
  CHECK(order_of(plan_of(2, true), Run::observed_first).size() == order_of(plan_of(2, true), Run::first).size());
  Plan plan = plan_of(2, true);
  plan.options.train = false;
  for (Run run : {Run::first, Run::later, Run::update, Run::observed_first, Run::observe_weights})
    CHECK(order_of(plan, run).empty());
  CHECK(order_of(plan, Run::evaluate).size() == 4);
}

TEST_CASE("an update of windows is deferred, requantizes its windows, and runs one layer ahead of the forward pass") {
  Plan plan = plan_of(2, false);
  plan.parameters.resize(2);
  plan.parameters[0].spec.group = ParameterGroup::embedding;
  plan.parameters[1].spec.group = ParameterGroup::block;
  for (ParameterPlan& parameter : plan.parameters) {
    parameter.forms.resize(1);
    parameter.forms[0].refresh.program.ops.emplace_back();
  }
  for (int layer : {-1, 0, 1})
    plan.updates.push_back({.group = layer < 0 ? ParameterGroup::embedding : ParameterGroup::block,
                            .layer = layer,
                            .parts = {{.parameter = layer < 0 ? 0u : 1u, .layer = layer}}});
  auto windows = [&](Run run, std::size_t count) {
    std::vector<std::pair<int, int>> found;  // layer, window
    for (const Stop& stop : order_of(plan, run))
      if (found.size() < count) found.emplace_back(stop.layer, stop.window);
    return found;
  };
  using Windows = std::vector<std::pair<int, int>>;
  CHECK(windows(Run::apply, 9) == Windows{{-1, 0}, {-1, 0}, {0, 1}, {0, 1}, {1, 2}, {1, 2}});
  // norm; the ends of the head's and the layers' states
  CHECK(windows(Run::update, 9) == Windows{{-1, 0}, {-1, 1}, {0, 2}, {1, 3}});
  // embedding and layer 0, then the embedding's program; layer 1, then layer 0's program; layer 1's program
  CHECK(windows(Run::updating_first, 9) ==
        Windows{{-1, 0}, {-1, 0}, {0, 1}, {0, 1}, {-1, 2}, {1, 3}, {1, 3}, {0, 4}, {1, 5}});
}

TEST_CASE("squares are summed in the micro-step that ends a step, with the gradients they are of") {
  Plan plan = plan_of(2, false);
  CHECK(order_of(plan, Run::last).empty());
  plan.options.state.gradients.memory = "host";
  plan.squares.resize(3);
  CHECK(order_of(plan, Run::first).size() == 7);
  for (Run run : {Run::last, Run::only}) {
    const std::vector<Stop> order = order_of(plan, run);
    REQUIRE(order.size() == 10);
    for (std::size_t i = 1; i < order.size(); ++i) {
      const bool squares = order[i].flow == Stop::Flow::none;
      CHECK(order[i].window == order[i - 1].window + (squares ? 0 : 1));
      if (squares) CHECK(order[i].program == &plan.squares[static_cast<std::size_t>(order[i].layer + 1)]);
    }
  }
}
