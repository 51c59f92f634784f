#include "plan/schedule/order.h"

#include <algorithm>

#include "program/names.h"

namespace quern {

namespace {

using Flow = Stop::Flow;

void number_windows(std::vector<Stop>& order) {
  int window = -1;
  for (Stop& stop : order) {
    if (!stop.joins) ++window;
    stop.window = window;
  }
}

int layers_of(const Plan& plan) { return static_cast<int>(plan.model.layers); }

using Group = ParameterGroup;

Stop meeting(Meeting kind, Group group = Group::block, int layer = -1) {
  return {.layer = layer, .meeting = kind, .group = group};
}

bool in_stores(const Plan& plan) { return plan.options.state.gradients.memory != kOnDevice; }
bool ranks_meet(const Plan& plan) { return plan.options.state.meet; }

/// The programs that make the rest of gathered working copies.
void add_rest(const Plan& plan, std::vector<Stop>& order, Group group, int layer) {
  for (const ParameterPlan& parameter : plan.parameters)
    if (parameter.spec.group == group && !parameter.shards_weights)
      order.push_back({&plan.forms_of(parameter, layer).rest, Flow::none, layer});
}

bool reads_any_of(const Program& program, const Program& made) {
  return std::any_of(made.ops.begin(), made.ops.end(), [&](const Op& op) {
    return std::any_of(op.outputs.begin(), op.outputs.end(),
                       [&](ValueId id) { return id != kNoValue && program.find(made[id].name) != kNoValue; });
  });
}

/// The program, in one window with what it reads that is made of weights that ranks gather for it.
void add_program(const Plan& plan, std::vector<Stop>& order, Stop stop) {
  for (const ParameterPlan& parameter : plan.parameters) {
    const bool in_layer = parameter.spec.group == Group::block;
    if (!parameter.shards_weights || in_layer != (stop.layer >= 0)) continue;
    const PlacedProgram& rest = plan.forms_of(parameter, stop.layer).rest;
    if (!reads_any_of(stop.program->program, rest.program)) continue;
    order.push_back({.program = &rest, .layer = stop.layer, .joins = stop.joins});
    stop.joins = true;
  }
  order.push_back(stop);
}

/// The update of a group's or layer's tensors, if it is deferred, followed by what refreshes their working copies while
/// they are at hand; then the gather of what ranks made of these.
void add_applied(const Plan& plan, std::vector<Stop>& order, Group group, int layer) {
  for (const UpdateWindow& window : plan.updates) {
    if (!plan.defers_update() || window.group != group || window.layer != layer) continue;
    order.push_back({.program = &window.program, .layer = layer, .rows = window.rows});
    auto follow = [&](const PlacedProgram& program) {
      order.push_back({.program = &program, .layer = layer, .joins = true, .rows = window.rows});
    };
    auto follow_whole = [&](PlacedProgram ParameterForms::*form) {
      for (const UpdatePart& part : window.parts) {
        const PlacedProgram& program = plan.forms_of(plan.parameters[part.parameter], layer).*form;
        if (part.rows.whole() && !program.program.ops.empty()) follow(program);
      }
    };
    follow_whole(&ParameterForms::amax);
    for (const PlacedProgram& program : window.follow) follow(program);
    if (!window.agrees.empty())
      order.push_back({.layer = layer, .meeting = Meeting::amaxes, .joins = true, .update = &window});
    follow_whole(&ParameterForms::refresh);
  }
  if (ranks_meet(plan)) order.push_back(meeting(Meeting::gather, group, layer));
}

void add_all_rest(const Plan& plan, std::vector<Stop>& order) {
  if (ranks_meet(plan))
    for_each_group(plan.model.layers, [&](Group group, int layer) { add_rest(plan, order, group, layer); });
}

std::vector<Stop> apply(const Plan& plan) {
  std::vector<Stop> order;
  for_each_group(plan.model.layers, [&](Group group, int layer) { add_applied(plan, order, group, layer); });
  add_all_rest(plan, order);
  return order;
}

/// A first one applies the last update: if it was deferred, ahead of the program that reads it first, else all gathers
/// at once, which go on beside the programs. In a last one gradients are final behind the program that makes them, and
/// so are the sums of their squares.
std::vector<Stop> training(const Plan& plan, const MicroStep& step) {
  const int layers = layers_of(plan);
  const bool ranks = ranks_meet(plan), reduces = step.last && ranks;
  const bool applies = step.first && (step.updates || !plan.defers_update());
  std::vector<Stop> order;
  auto finish_gather = [&](Group group, int layer = -1) {
    if (applies && ranks) add_rest(plan, order, group, layer);
  };
  // One ahead, so that stored values are there again in time.
  auto update_before = [&](int layer) {
    if (!step.updates) return;
    if (layer < 0) add_applied(plan, order, Group::embedding, -1);
    layer + 1 < layers ? add_applied(plan, order, Group::block, layer + 1) : add_applied(plan, order, Group::head, -1);
  };
  auto finish = [&](Group group, int layer = -1) {
    if (!plan.trees.empty()) order.push_back({&plan.trees[static_cast<std::size_t>(group)], Flow::none, layer});
    if (reduces) order.push_back(meeting(Meeting::reduce, group, layer));
    if (step.last && in_stores(plan) && !ranks && group != Group::head)
      order.push_back({.program = &plan.squares[static_cast<std::size_t>(layer + 1)], .layer = layer, .joins = true});
  };
  if (applies && !step.updates)
    for_each_group(plan.model.layers, [&](Group group, int layer) { add_applied(plan, order, group, layer); });
  update_before(-1);
  finish_gather(Group::embedding);
  add_program(plan, order, {&plan.embed, Flow::forward, -1, -1, 0});
  for (int layer = 0; layer < layers; ++layer) {
    update_before(layer);
    finish_gather(Group::block, layer);
    add_program(plan, order, {&plan.layer_class(layer).forward, Flow::forward, layer, layer, layer + 1});
  }
  finish_gather(Group::head);
  add_program(plan, order, {&plan.head_train, Flow::turn, -1, layers, layers});
  finish(Group::head);
  for (int layer = layers; layer-- > 0;) {
    add_program(plan, order, {&plan.layer_class(layer).backward, Flow::backward, layer, layer + 1, layer});
    finish(Group::block, layer);
  }
  add_program(plan, order, {&plan.embed_backward, Flow::backward, -1, 0, -1});
  finish(Group::embedding);
  if (reduces) order.push_back(meeting(Meeting::sum));
  return order;
}

std::vector<Stop> evaluation(const Plan& plan, const PlacedProgram& head, std::string_view result = {}) {
  const int layers = layers_of(plan);
  std::vector<Stop> order;
  add_program(plan, order, {&plan.embed, Flow::evaluate, -1, -1, 0});
  for (int layer = 0; layer < layers; ++layer)
    add_program(plan, order, {&plan.layer_class(layer).evaluate, Flow::evaluate, layer, layer, layer + 1});
  add_program(plan, order, {&head, Flow::evaluate, -1, layers, -1, result});
  return order;
}

/// A program for every parameter, or every one that trains, in each layer that has its master.
std::vector<Stop> each_parameter(const Plan& plan, PlacedProgram ParameterForms::*form, bool trained = false) {
  std::vector<Stop> order;
  for (const ParameterPlan& parameter : plan.parameters)
    for_each_layer(parameter.spec, layers_of(plan), [&](int layer) {
      const ParameterForms& forms = plan.forms_of(parameter, layer);
      if (!forms.loads && (parameter.spec.trainable || !trained)) order.push_back({&(forms.*form), Flow::none, layer});
    });
  return order;
}

/// What makes the forms of frozen parameters that ops read, each behind its master.
std::vector<Stop> loading(const Plan& plan) {
  std::vector<Stop> order;
  for (const ParameterPlan& parameter : plan.parameters)
    for_each_layer(parameter.spec, layers_of(plan), [&](int layer) {
      const ParameterForms& forms = plan.forms_of(parameter, layer);
      if (!forms.loads) return;
      order.push_back({.layer = layer, .loads = &parameter});
      for (const PlacedProgram* program : {&forms.amax, &forms.refresh})
        order.push_back({.program = program, .layer = layer, .joins = true});
    });
  return order;
}

void add_amaxes(const Plan& plan, std::vector<Stop>& order) {
  if (!ranks_meet(plan)) return;
  if (plan.options.state.master.memory == kOnDevice)
    order.push_back({&plan.amaxes});
  else  // one at a time, so that slots can hold them
    for (const Stop& stop : each_parameter(plan, &ParameterForms::amax)) order.push_back(stop);
  order.push_back(meeting(Meeting::amaxes));
}

std::vector<Stop> refresh(const Plan& plan) {
  std::vector<Stop> order;
  add_amaxes(plan, order);
  for (const Stop& stop : each_parameter(plan, &ParameterForms::refresh)) order.push_back(stop);
  if (ranks_meet(plan))
    for_each_group(plan.model.layers,
                   [&](Group group, int layer) { order.push_back(meeting(Meeting::gather, group, layer)); });
  add_all_rest(plan, order);
  return order;
}

std::vector<Stop> update(const Plan& plan) {
  std::vector<Stop> order;
  if (ranks_meet(plan) || !plan.trees.empty())
    for (const PlacedProgram& squares : plan.squares) order.push_back({&squares});
  if (ranks_meet(plan)) order.push_back(meeting(Meeting::sum_norms));
  order.push_back({&plan.norm});
  if (plan.updates.size() == 1) {
    order.push_back({&plan.updates.front().program});
    add_amaxes(plan, order);
    for (const Stop& stop : each_parameter(plan, &ParameterForms::refresh, true)) order.push_back(stop);
  } else if (ranks_meet(plan)) {
    order.push_back(meeting(Meeting::states));
  }
  order.push_back({&plan.head_advance});
  for (int layer = 0; layer < layers_of(plan); ++layer)
    order.push_back({&plan.layer_class(layer).advance, Flow::none, layer});
  return order;
}

std::vector<Stop> exchange(const Plan& plan) {
  std::vector<Stop> order;
  for (const UpdateWindow& window : plan.updates)
    if (!window.exchange.program.ops.empty())
      order.push_back({.program = &window.exchange, .layer = window.layer, .rows = window.rows});
  return order;
}

std::vector<Stop> stops_of(const Plan& plan, const Run& run) {
  const PlanOptions& options = plan.options;
  const bool observes = options.train && options.observe, defers = plan.defers_update();
  const bool ends = options.train && (in_stores(plan) || ranks_meet(plan));
  switch (const MicroStep& step = run.step; run.kind) {
    case Run::Kind::micro_step:
      if (options.train && (ends || !step.last) && (observes || !step.observed) && (defers || !step.updates))
        return training(plan, step);
      break;
    case Run::Kind::load: return loading(plan);
    case Run::Kind::refresh: return refresh(plan);
    case Run::Kind::evaluate: return evaluation(plan, plan.head_evaluate);
    case Run::Kind::logits:
      if (options.logits) return evaluation(plan, plan.head_logits, names::kLogits);
      break;
    case Run::Kind::next_logits:
      if (options.next_logits) return evaluation(plan, plan.head_next, names::kNextLogits);
      break;
    case Run::Kind::apply:
      if (defers || ranks_meet(plan)) return apply(plan);
      break;
    case Run::Kind::exchange:
      if (options.train) return exchange(plan);
      break;
    case Run::Kind::update:
      if (options.train) return update(plan);
      break;
    case Run::Kind::observe_weights:
      if (observes) return each_parameter(plan, &ParameterForms::observe);
      break;
    case Run::Kind::upload:
    case Run::Kind::result: break;
  }
  return {};
}

}  // namespace

std::vector<Stop> order_of(const Plan& plan, const Run& run) {
  std::vector<Stop> order = stops_of(plan, run);
  number_windows(order);
  return order;
}

}  // namespace quern
