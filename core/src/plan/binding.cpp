#include "plan/binding.h"

#include <algorithm>
#include <string>

#include "quern/error.h"

namespace quern {

namespace {

int position(const std::vector<ValueId>& list, ValueId id) {
  auto it = std::find(list.begin(), list.end(), id);
  return it == list.end() ? -1 : static_cast<int>(it - list.begin());
}

// The stream at a boundary: in a layer's slab when a neighbour keeps it, else in one of two shared buffers.
std::int64_t stream_offset(const Plan& plan, int boundary, int operand, bool evaluate) {
  if (evaluate) {
    // What the first block hands on as it came is put at once where the next block reads it.
    const Program& first = plan.layer_class(0).evaluate.program;
    if (boundary == 0)
      if (int out = position(first.outputs, first.inputs[static_cast<std::size_t>(operand)]); out >= 0)
        return plan.boundary_buffers[1][static_cast<std::size_t>(out)];
    return plan.boundary_buffers[boundary % 2][static_cast<std::size_t>(operand)];
  }
  return plan.boundary_offsets[static_cast<std::size_t>(boundary)][static_cast<std::size_t>(operand)];
}

std::int64_t boundary_offset(const Plan& plan, const PlacedProgram& placed, ValueId id, const Site& site) {
  bool evaluate = site.pass == Site::Pass::evaluate;
  int in = position(placed.program.inputs, id), out = position(placed.program.outputs, id);
  if (site.pass == Site::Pass::backward || &placed == &plan.head_train) {
    // The head's training program takes the stream and hands on its gradient.
    if (out >= 0 && site.boundary_out >= 0) return plan.gradient_buffers[site.boundary_out % 2];
    if (in >= 0 && site.pass == Site::Pass::backward) return plan.gradient_buffers[site.boundary_in % 2];
  } else if (out >= 0) {
    // Programs of logits hand their result to nobody but the reader of that tensor.
    if (&placed == &plan.head_logits) return plan.tensor("logits", "", -1).offset;
    if (&placed == &plan.head_next) return plan.tensor("next_logits", "", -1).offset;
    return stream_offset(plan, site.boundary_out, out, evaluate);
  }
  if (in >= 0) return stream_offset(plan, site.boundary_in, in, evaluate);
  return -1;
}

std::int64_t saved_offset(const Plan& plan, const std::string& name, const Site& site) {
  const LayerClass& layer_class = plan.layer_class(site.layer);
  // A kept input may live with the neighbour that made it.
  const Program& forward = layer_class.forward.program;
  ValueId id = forward.find(name);
  if (int in = position(forward.inputs, id); in >= 0) return stream_offset(plan, site.layer, in, false);
  auto it = layer_class.saved_offsets.find(name);
  if (it == layer_class.saved_offsets.end()) fail_internal("plan", layer_class.name + " does not keep " + name);
  return plan.slab_of_layer[static_cast<std::size_t>(site.layer)] + it->second;
}

}  // namespace

std::int64_t offset_of(const Plan& plan, const PlacedProgram& placed, ValueId id, const Site& site) {
  if (id == kNoValue) return -1;
  const Value& value = placed.program[id];
  if (std::int64_t at = boundary_offset(plan, placed, id, site); at >= 0) return at;
  bool in_layer = site.layer >= 0;
  auto layer_of = [&](std::string_view parameter) {
    for (const ParameterPlan& known : plan.parameters)
      if (known.spec.name == parameter) return known.spec.group == ParameterGroup::block ? site.layer : -1;
    return -1;
  };
  switch (value.role) {
    case Role::runtime: return plan.tensor(value.name, "", -1).offset;
    case Role::parameter: {
      std::string kind = value.name == value.parameter ? "working" : value.name;
      return plan.tensor(kind, value.parameter, layer_of(value.parameter)).offset;
    }
    case Role::parameter_grad: return plan.tensor("gradient", value.parameter, layer_of(value.parameter)).offset;
    case Role::state: {
      if (value.name == "loss_stats" && site.pass == Site::Pass::evaluate)
        return plan.tensor("eval_stats", "", -1).offset;
      if (!value.parameter.empty()) return plan.tensor(value.name, value.parameter, layer_of(value.parameter)).offset;
      if (plan.find(value.name, "", -1)) return plan.tensor(value.name, "", -1).offset;
      return plan.tensor(value.name, "", in_layer ? site.layer : -1).offset;
    }
    case Role::observation: return plan.tensor(value.name, "", in_layer ? site.layer : -1).offset;
    case Role::saved: return saved_offset(plan, value.name, site);
    case Role::local: {
      std::int64_t offset = placed.offsets[static_cast<std::size_t>(id)];
      return offset < 0 ? -1 : plan.transient_offset + offset;
    }
    case Role::boundary: break;
  }
  fail_internal("plan", "value " + value.name + " of " + placed.program.name + " has no place");
}

}  // namespace quern
