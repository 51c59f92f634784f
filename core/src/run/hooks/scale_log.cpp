#include "run/hooks/scale_log.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include "program/passes/observe.h"

namespace quern {

namespace {

void add_observed(std::vector<ObservedTensor>& tensors, const Plan& plan, const Program& program, int layer) {
  for (const Op& op : program.ops)
    for (ValueId id : op.outputs) {
      if (id == kNoValue || program[id].role != Role::observation) continue;
      // What a loss brings to 8 bits is its gradient.
      const char* format = op.attributes.has("format") ? "format" : "gradient_format";
      ObservedTensor tensor{.name = observed_tensor(program[id]),
                            .layer = layer,
                            .format = op.attributes.word(format),
                            .observation = plan.tensor({program[id].name, "", layer}),
                            .state = {}};
      for (ValueId input : op.inputs) {
        if (input == kNoValue || program[input].role != Role::state || !program[input].parameter.empty()) continue;
        tensor.state = plan.tensor({program[input].name, "", layer});
        tensor.state->extents = {kScaleStateWords};
      }
      tensors.push_back(std::move(tensor));
    }
}

/// By layer, those outside the layers last, weights behind the others; empty unless options.observe.
std::vector<ObservedTensor> observed_tensors(const Plan& plan) {
  std::vector<ObservedTensor> tensors;
  if (!plan.options.train || !plan.options.observe) return tensors;
  const int layers = static_cast<int>(plan.model.layers);
  for (int layer = 0; layer < layers; ++layer) {
    add_observed(tensors, plan, plan.layer_class(layer).forward.program, layer);
    add_observed(tensors, plan, plan.layer_class(layer).backward.program, layer);
  }
  for (const PlacedProgram* placed : {&plan.embed, &plan.head_train, &plan.embed_backward})
    add_observed(tensors, plan, placed->program, -1);
  for (const ParameterPlan& parameter : plan.parameters)
    for_each_layer(parameter.spec, layers, [&](int layer) {
      add_observed(tensors, plan, plan.forms_of(parameter, layer).observe.program, layer);
    });
  return tensors;
}

}  // namespace

LogEvent scale_event(const ObservedTensor& tensor, const ScaleObservation& seen, const ScaleState* state,
                     std::int64_t step) {
  LogEvent event{"scale", {{"step", step}, {"tensor", tensor.name}}};
  if (tensor.layer >= 0) event.fields.emplace_back("layer", std::int64_t{tensor.layer});
  event.fields.emplace_back("format", tensor.format);
  event.fields.emplace_back("amax", double{seen.amax});
  if (seen.largest_scale > 0) event.fields.emplace_back("scale", double{seen.largest_scale});
  if (seen.smallest_scale < seen.largest_scale)
    event.fields.emplace_back("smallest_scale", double{seen.smallest_scale});
  if (state) event.fields.emplace_back("redone", std::int64_t{state->redone});
  if (seen.elements > 0) {
    const auto elements = static_cast<double>(seen.elements);
    event.fields.emplace_back("clipped", static_cast<double>(seen.clipped) / elements);
    event.fields.emplace_back("underflowed", static_cast<double>(seen.underflowed) / elements);
    if (seen.non_finite > 0) event.fields.emplace_back("non_finite", static_cast<double>(seen.non_finite) / elements);
  }
  return event;
}

void add_observation(ScaleObservation& to, const ScaleObservation& from) {
  to.amax = std::max(to.amax, from.amax);
  to.largest_scale = std::max(to.largest_scale, from.largest_scale);
  to.smallest_scale = std::min(to.smallest_scale, from.smallest_scale);
  to.elements += from.elements;
  to.underflowed += from.underflowed;
  to.clipped += from.clipped;
  to.non_finite += from.non_finite;
}

std::vector<LogEvent> read_scales(Engine& engine, Ranks& ranks, const std::vector<ObservedTensor>& tensors,
                                  std::int64_t step) {
  engine.observe_weights();
  std::vector<PlannedTensor> wanted;
  for (const ObservedTensor& tensor : tensors) {
    wanted.push_back(tensor.observation);
    if (tensor.state) wanted.push_back(*tensor.state);
  }
  static_assert(sizeof(ScaleObservation) == sizeof(ScaleState));
  std::string own(wanted.size() * sizeof(ScaleState), '\0');
  engine.read(wanted, reinterpret_cast<std::byte*>(own.data()));
  const std::vector<std::string> all = ranks.exchange(std::move(own));
  std::vector<LogEvent> events;
  std::size_t next = 0;
  for (const ObservedTensor& tensor : tensors) {
    ScaleObservation seen;
    std::memcpy(&seen, all[0].data() + next, sizeof seen);
    for (std::size_t rank = 1; rank < all.size(); ++rank) {
      ScaleObservation more;
      std::memcpy(&more, all[rank].data() + next, sizeof more);
      add_observation(seen, more);
    }
    next += sizeof seen;
    ScaleState state;
    for (const std::string& one : all) {
      ScaleState more;
      if (tensor.state) std::memcpy(&more, one.data() + next, sizeof more);
      state.redone = std::max(state.redone, more.redone);
    }
    if (tensor.state) next += sizeof state;
    events.push_back(scale_event(tensor, seen, tensor.state ? &state : nullptr, step));
  }
  return events;
}

void ScaleLog::open(const RunState& state) {
  if (state.session.log.scales_every == 0) return;
  observed_ = observed_tensors(state.engine.plan());
  if (observed_.empty())
    state.log.warn("log.scales_every: precision " + state.session.config.id("precision") +
                   " quantizes no tensor here, so there are no scales to log");
}

void ScaleLog::before_step(const RunState& state, Step& step) {
  if (!observed_.empty() && step.number % state.session.log.scales_every == 0) step.observe = Observe::yes;
}

void ScaleLog::before_update(const RunState& state, const Step& step) {
  if (step.observe == Observe::yes) events_ = read_scales(state.engine, state.ranks, observed_, step.number);
}

Verdict ScaleLog::after_step(const RunState& state, const Step&) {
  for (const LogEvent& event : std::exchange(events_, {})) state.log.write(event);
  return Verdict::go_on;
}

}  // namespace quern
