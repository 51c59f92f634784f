#include "train/scale_log.h"

#include <string_view>

#include "train/engine.h"

namespace quern {

namespace {

void add_states(std::vector<ScaledTensor>& tensors, const Plan& plan, const Program& advance, int layer) {
  constexpr std::string_view kSuffix = ".state";
  for (const Op& op : advance.ops) {
    if (op.kind != "advance_scale") continue;
    const std::string& name = advance[op.inputs[0]].name;
    ScaledTensor tensor{
        .name = name, .layer = layer, .format = op.attributes.word("format"), .state = plan.tensor(name, "", layer)};
    if (name.ends_with(kSuffix)) tensor.name.resize(name.size() - kSuffix.size());
    tensor.state.extents = {kScaleStateWords};
    tensors.push_back(std::move(tensor));
  }
}

double count(const std::uint32_t (&words)[2]) { return words[1] * 0x1p32 + words[0]; }

}  // namespace

std::vector<ScaledTensor> scaled_tensors(const Plan& plan) {
  std::vector<ScaledTensor> tensors;
  if (!plan.options.train) return tensors;
  for (int layer = 0; layer < static_cast<int>(plan.model.layers); ++layer)
    add_states(tensors, plan, plan.layer_class(layer).advance.program, layer);
  add_states(tensors, plan, plan.head_advance.program, -1);
  return tensors;
}

LogEvent scale_event(const ScaledTensor& tensor, const ScaleState& state, std::int64_t step) {
  LogEvent event{"scale", {{"step", step}, {"tensor", tensor.name}}};
  if (tensor.layer >= 0) event.fields.emplace_back("layer", std::int64_t{tensor.layer});
  event.fields.emplace_back("format", tensor.format);
  event.fields.emplace_back("amax", double{state.amax});
  event.fields.emplace_back("scale", double{state.scale});
  event.fields.emplace_back("redone", std::int64_t{state.redone});
  if (double elements = count(state.elements); elements > 0) {
    event.fields.emplace_back("clipped", count(state.clipped) / elements);
    event.fields.emplace_back("underflowed", count(state.underflowed) / elements);
  }
  return event;
}

std::vector<LogEvent> read_scales(Engine& engine, const std::vector<ScaledTensor>& tensors, std::int64_t step) {
  std::vector<LogEvent> events;
  for (const ScaledTensor& tensor : tensors) {
    ScaleState state;
    engine.read(tensor.state, &state);
    events.push_back(scale_event(tensor, state, step));
  }
  return events;
}

}  // namespace quern
