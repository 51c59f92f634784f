#include "plan/order.h"

namespace quern {

namespace {

using Flow = Stop::Flow;

int layers_of(const Plan& plan) { return static_cast<int>(plan.model.layers); }

std::vector<Stop> training(const Plan& plan) {
  const int layers = layers_of(plan);
  std::vector<Stop> order{{&plan.embed, Flow::forward, -1, -1, 0}};
  for (int layer = 0; layer < layers; ++layer)
    order.push_back({&plan.layer_class(layer).forward, Flow::forward, layer, layer, layer + 1});
  order.push_back({&plan.head_train, Flow::turn, -1, layers, layers});
  for (int layer = layers; layer-- > 0;)
    order.push_back({&plan.layer_class(layer).backward, Flow::backward, layer, layer + 1, layer});
  order.push_back({&plan.embed_backward, Flow::backward, -1, 0, -1});
  return order;
}

std::vector<Stop> evaluation(const Plan& plan, const PlacedProgram& head, std::string_view result = {}) {
  const int layers = layers_of(plan);
  std::vector<Stop> order{{&plan.embed, Flow::evaluate, -1, -1, 0}};
  for (int layer = 0; layer < layers; ++layer)
    order.push_back({&plan.layer_class(layer).evaluate, Flow::evaluate, layer, layer, layer + 1});
  order.push_back({&head, Flow::evaluate, -1, layers, -1, result});
  return order;
}

/// A program for every parameter, in each layer that has it.
template <class Pick>
void each_parameter(const Plan& plan, std::vector<Stop>& order, Pick pick) {
  for (const ParameterPlan& parameter : plan.parameters)
    for_each_layer(parameter.spec, layers_of(plan), [&](int layer) {
      order.push_back({&pick(parameter, layer), Flow::none, layer});
    });
}

std::vector<Stop> update(const Plan& plan) {
  std::vector<Stop> order{{&plan.norm}, {&plan.update}};
  each_parameter(
      plan, order, [&](const ParameterPlan& p, int layer) -> auto& { return plan.refresh_of(p, layer); });
  order.push_back({&plan.head_advance});
  for (int layer = 0; layer < layers_of(plan); ++layer)
    order.push_back({&plan.layer_class(layer).advance, Flow::none, layer});
  return order;
}

}  // namespace

std::vector<Stop> order_of(const Plan& plan, Run run) {
  const PlanOptions& options = plan.options;
  std::vector<Stop> order;
  switch (run) {
    case Run::refresh:
      each_parameter(
          plan, order, [&](const ParameterPlan& p, int layer) -> auto& { return plan.refresh_of(p, layer); });
      return order;
    case Run::evaluate: return evaluation(plan, plan.head_evaluate);
    case Run::logits: return options.logits ? evaluation(plan, plan.head_logits, "logits") : order;
    case Run::next_logits: return options.next_logits ? evaluation(plan, plan.head_next, "next_logits") : order;
    case Run::first:
    case Run::later: return options.train ? training(plan) : order;
    case Run::observed_first:
    case Run::observed_later: return options.train && options.observe ? training(plan) : order;
    case Run::update: return options.train ? update(plan) : order;
    case Run::observe_weights:
      if (options.train && options.observe)
        each_parameter(
            plan, order, [&](const ParameterPlan& p, int layer) -> auto& { return plan.observe_of(p, layer); });
      return order;
    case Run::upload:
    case Run::reduce:
    case Run::result: return order;
  }
  return order;
}

}  // namespace quern
