#include <algorithm>
#include <utility>

#include "quern/error.h"
#include "quern/op_spec.h"
#include "quern/options.h"

namespace quern {

void OpSet::add(OpSpec spec) {
  std::string kind = spec.kind;
  if (!specs_.emplace(kind, std::move(spec)).second)
    throw Error(ErrorCode::config, {.where = "op " + kind,
                                    .what = "is defined twice",
                                    .found = {},
                                    .expected = {},
                                    .next = "rename the plugin's op"});
}

const OpSpec* OpSet::find(std::string_view kind) const {
  auto it = specs_.find(kind);
  return it == specs_.end() ? nullptr : &it->second;
}

const OpSpec& OpSet::at(std::string_view kind) const {
  if (const OpSpec* spec = find(kind)) return *spec;
  std::string nearest = nearest_name(kind, kinds());
  throw Error(ErrorCode::config, {.where = "program",
                                  .what = "unknown op kind",
                                  .found = std::string(kind),
                                  .expected = nearest.empty() ? "an op of the vocabulary" : nearest,
                                  .next = "a plugin that brings this op must be loaded"});
}

std::vector<std::string> OpSet::kinds() const {
  std::vector<std::string> kinds;
  for (const auto& [kind, spec] : specs_) kinds.push_back(kind);
  return kinds;
}

void InferContext::refuse(std::size_t input, const std::string& what) const {
  std::string found =
      input < inputs.size() && inputs[input] ? inputs[input]->name + " " + to_string(inputs[input]->shape) : "nothing";
  throw Error(ErrorCode::config, {.where = "op " + std::string(kind) + ", operand " + std::to_string(input),
                                  .what = {},
                                  .found = found,
                                  .expected = what,
                                  .next = "correct the model's program"});
}

std::vector<ValueId> append_op(Program& program, const OpSet& ops, DType activation_dtype, Op op,
                               const std::string& name) {
  const OpSpec& spec = ops.at(op.kind);
  bool repeats = !spec.inputs.empty() && spec.inputs.back().back() == '*';
  std::vector<const Value*> inputs;
  for (std::size_t i = 0; i < std::max(op.inputs.size(), spec.inputs.size() - (repeats ? 1 : 0)); ++i) {
    bool absent = i >= op.inputs.size() || op.inputs[i] == kNoValue;
    if (absent && !spec.optional_input(i)) fail_internal("op " + op.kind, "operand " + spec.inputs[i] + " is missing");
    if (i >= spec.inputs.size() && !repeats) fail_internal("op " + op.kind, "has too many operands");
    inputs.push_back(absent ? nullptr : &program[op.inputs[i]]);
  }
  std::vector<Value> outputs(spec.outputs.size());
  for (std::size_t i = 0; i < outputs.size(); ++i)
    outputs[i].name = i == 0 || spec.outputs[i].empty() ? name : name + "." + spec.outputs[i];
  InferContext context{inputs, op.attributes, outputs, activation_dtype, op.kind};
  spec.infer(context);
  for (const auto& [output, input] : spec.updates) {
    const Value &made = outputs.at(static_cast<std::size_t>(output)),
                *from = inputs.at(static_cast<std::size_t>(input));
    if (from && (made.shape != from->shape || made.dtype != from->dtype))
      throw Error(ErrorCode::config, {.where = "op " + op.kind + ", output " + std::to_string(output),
                                      .what = "is operand " + std::to_string(input) + ", updated in place",
                                      .found = std::string(name_of(made.dtype)) + " " + to_string(made.shape),
                                      .expected = std::string(name_of(from->dtype)) + " " + to_string(from->shape),
                                      .next = "correct infer or updates of its OpSpec"});
  }
  op.outputs.clear();
  for (Value& output : outputs) op.outputs.push_back(program.add_value(std::move(output)));
  program.ops.push_back(op);
  return op.outputs;
}

BackwardContext::BackwardContext(Program& program, const OpSet& ops, Op op, std::vector<ValueId> output_grads,
                                 DType activation_dtype)
    : program_(program),
      ops_(ops),
      op_(std::move(op)),
      output_grads_(std::move(output_grads)),
      input_grads_(op_.inputs.size(), kNoValue),
      activation_dtype_(activation_dtype) {}

std::vector<ValueId> BackwardContext::emit(std::string kind, std::vector<ValueId> inputs, std::vector<int> grad_of,
                                           Attributes attributes) {
  Op op{.kind = std::move(kind),
        .inputs = std::move(inputs),
        .outputs = {},
        .attributes = std::move(attributes),
        .phase = Phase::backward};
  std::vector<ValueId> outputs = append_op(program_, ops_, activation_dtype_, std::move(op), "d.tmp");
  for (std::size_t i = 0; i < outputs.size() && i < grad_of.size(); ++i) {
    if (grad_of[i] < 0) continue;
    ValueId input = op_.inputs[static_cast<std::size_t>(grad_of[i])];
    Value& grad = program_[outputs[i]];
    std::string wanted = "d." + program_[input].name;
    grad.name = wanted;
    for (int number = 2; program_.find(wanted) != outputs[i]; ++number)
      wanted = "d." + program_[input].name + "." + std::to_string(number), grad.name = wanted;
    if (program_[input].role == Role::parameter) {
      grad.role = Role::parameter_grad;
      grad.parameter = program_[input].parameter;
    } else {
      input_grads_[static_cast<std::size_t>(grad_of[i])] = outputs[i];
    }
  }
  return outputs;
}

bool sums_up(const Program& program, const OpSet& ops, const Op& op, std::size_t output) {
  ValueId id = op.outputs[output];
  if (id == kNoValue) return false;
  const Role role = program[id].role;
  return role == Role::parameter_grad || role == Role::observation || ops.at(op.kind).statistics;
}

std::vector<bool> read_values(const Program& program) {
  std::vector<bool> read(program.values.size(), false);
  for (std::size_t i = 0; i < read.size(); ++i) read[i] = program.values[i].role != Role::local;
  for (const Op& op : program.ops)
    for (ValueId id : op.inputs)
      if (id != kNoValue) read[static_cast<std::size_t>(id)] = true;
  for (ValueId id : program.outputs) read[static_cast<std::size_t>(id)] = true;
  return read;
}

OpInstance instantiate(const Program& program, const Op& op, const Geometry& geometry, const std::vector<bool>& read) {
  OpInstance instance{.kind = op.kind, .inputs = {}, .outputs = {}, .attributes = op.attributes, .geometry = geometry};
  auto operand = [&](ValueId id, bool present) {
    Operand operand;
    if (id == kNoValue) return operand;
    operand.dtype = program[id].dtype;
    operand.extents = extents_at(program[id].shape, geometry);
    operand.present = present;
    return operand;
  };
  for (ValueId id : op.inputs) instance.inputs.push_back(operand(id, true));
  for (ValueId id : op.outputs)
    instance.outputs.push_back(operand(id, id != kNoValue && read[static_cast<std::size_t>(id)]));
  return instance;
}

Cost cost_of(const OpSpec& spec, const OpInstance& op) {
  if (spec.cost) return spec.cost(op);
  Cost cost;
  for (const Operand& operand : op.inputs) cost.bytes += static_cast<double>(operand.bytes());
  for (const Operand& operand : op.outputs) cost.bytes += static_cast<double>(operand.bytes());
  return cost;
}

}  // namespace quern
