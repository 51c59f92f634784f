#include <algorithm>
#include <utility>

#include "optimizer/update_traits.h"
#include "program/names.h"
#include "quern/error.h"

namespace quern {

namespace {

/// Inputs of every list of tensors begin with "update" and "step".
constexpr std::size_t kShared = 2;

/// Whether the tensors of both lists have the same dtypes; `more` is of one parameter.
bool same_dtypes(const Program& program, const std::vector<ValueId>& list, const std::vector<ValueId>& more) {
  auto dtype = [&](ValueId id) { return id == kNoValue ? DType::u8 : program[id].dtype; };
  return list.size() >= more.size() && std::equal(more.begin() + kShared, more.end(), list.begin() + kShared,
                                                  [&](ValueId a, ValueId b) { return dtype(a) == dtype(b); });
}

bool repeats(const OpSpec& spec) { return !spec.inputs.empty() && spec.inputs.back().back() == '*'; }

}  // namespace

OptimizerState OptimizerState::elements(const ParameterSpec& spec, std::string name, DType dtype) {
  return {std::move(name), dtype, spec.extents};
}

OptimizerState OptimizerState::rows(const ParameterSpec& spec, std::string name, DType dtype) {
  return {std::move(name), dtype, {spec.extents[0], 1}};
}

OptimizerState OptimizerState::blocks(const ParameterSpec& spec, std::string name, DType dtype, std::int64_t block) {
  return {std::move(name), dtype, {spec.extents[0], (spec.columns() + block - 1) / block}};
}

UpdateBuilder::UpdateBuilder(const OpSet& ops, Program program, ValueId update, ValueId step)
    : ops_(ops), program_(std::move(program)), update_(update), step_(step) {}

void UpdateBuilder::begin(Tensors tensors) {
  tensors_ = std::move(tensors);
  first_ = true;
}

ValueId UpdateBuilder::state(std::string_view name) const {
  for (std::size_t i = 0; i < tensors_.states.size(); ++i)
    if (tensors_.states[i].name == name) return tensors_.state_values[i];
  fail_internal("optimizer", "has no state `" + std::string(name) + "` of `" + tensors_.spec->name + "`");
}

std::vector<ValueId> UpdateBuilder::op(std::string kind, std::vector<ValueId> inputs, const std::string& name,
                                       Attributes attributes) {
  const OpSpec& spec = ops_.at(kind);
  Op op{.kind = std::move(kind), .inputs = std::move(inputs), .outputs = {}, .attributes = std::move(attributes)};
  if (op.inputs.empty() || op.inputs.size() > spec.inputs.size())
    if (op.inputs.empty() || !repeats(spec)) fail_internal("op " + op.kind, "has another number of operands");
  std::vector<const Value*> operands;
  for (ValueId id : op.inputs) operands.push_back(id == kNoValue ? nullptr : &program_[id]);
  while (operands.size() < spec.inputs.size() && spec.optional_input(operands.size())) operands.push_back(nullptr);
  if (operands.size() + (repeats(spec) ? 1 : 0) < spec.inputs.size())
    fail_internal("op " + op.kind, "operand " + spec.inputs[operands.size()] + " is missing");
  std::vector<Value> outputs(spec.outputs.size());
  InferContext context{operands, op.attributes, outputs, operands.at(0)->dtype, op.kind};
  spec.infer(context);
  for (std::size_t o = 0; o < outputs.size(); ++o) {
    auto in_place = std::find_if(spec.updates.begin(), spec.updates.end(),
                                 [&](const auto& pair) { return pair.first == static_cast<int>(o); });
    if (in_place != spec.updates.end()) {
      op.outputs.push_back(op.inputs.at(static_cast<std::size_t>(in_place->second)));
      continue;
    }
    outputs[o].name = name + tensors_.suffix + " " + std::to_string(program_.values.size());
    program_.values.push_back(std::move(outputs[o]));  // names differ by number: no need to look among thousands
    op.outputs.push_back(static_cast<ValueId>(program_.values.size() - 1));
  }
  std::vector<ValueId> made = op.outputs;
  const bool joined = !spec.updates.empty() && join(spec, op);
  first_ = false;
  if (!joined) program_.ops.push_back(std::move(op));
  return made;
}

// Launches of their own would cost small tensors dearly.
bool UpdateBuilder::join(const OpSpec& spec, const Op& op) {
  const bool joins = first_ && repeats(spec) && op.inputs.size() >= kShared && op.inputs[0] == update_ &&
                     op.inputs[1] == step_ && spec.updates.size() == spec.outputs.size();
  auto known = std::find_if(updates_.begin(), updates_.end(), [&](const InPlace& other) {
    return joins && other.joins && program_.ops[other.op].kind == op.kind && other.attributes == op.attributes &&
           same_dtypes(program_, program_.ops[other.op].inputs, op.inputs);
  });
  const bool found = known != updates_.end();
  if (!found) known = updates_.insert(updates_.end(), {program_.ops.size(), op.attributes, {}, {}, joins});
  known->objects.push_back(static_cast<double>(tensors_.object));
  known->offsets.push_back(static_cast<double>(tensors_.offset));
  if (!found) return false;
  Op& list = program_.ops[known->op];
  list.inputs.insert(list.inputs.end(), op.inputs.begin() + kShared, op.inputs.end());
  list.outputs.insert(list.outputs.end(), op.outputs.begin(), op.outputs.end());
  return true;
}

Program UpdateBuilder::take() {
  for (InPlace& update : updates_) {
    Attributes& attributes = program_.ops[update.op].attributes;
    attributes.set("offsets", std::move(update.offsets));
    attributes.set("objects", std::move(update.objects));
  }
  return std::move(program_);
}

UpdateBuilder update_builder(const OpSet& ops, const char* step) {
  Program program;
  program.name = "update";
  const ValueId update =
      program.add_value({.name = names::kUpdate, .shape = {4}, .dtype = DType::f32, .role = Role::state});
  const ValueId id = program.add_value({.name = step, .shape = {16}, .dtype = DType::u32, .role = Role::runtime});
  return {ops, std::move(program), update, id};
}

UpdateTraits update_traits(const Optimizer& optimizer, const ParameterSpec& spec, const OpSet& ops) {
  UpdateTraits traits{.states = optimizer.states(spec), .locality = UpdateLocality::element};
  UpdateBuilder builder = update_builder(ops, names::kStep);
  auto add = [&](const std::string& name, DType dtype, const Extents& extents) {
    return builder.program().add_value(
        {.name = name, .shape = Shape(extents.begin(), extents.end()), .dtype = dtype, .role = Role::state});
  };
  UpdateBuilder::Tensors tensors{.spec = &spec,
                                 .states = traits.states,
                                 .gradient = add(names::kGradient, DType::f32, spec.extents),
                                 .master = add(names::kMaster, DType::f32, spec.extents)};
  for (const OptimizerState& state : traits.states) {
    tensors.state_values.push_back(add(state.name, state.dtype, state.extents));
    if (state.extents.empty() || state.extents[0] != spec.extents[0]) traits.locality = UpdateLocality::matrix;
  }
  builder.begin(std::move(tensors));
  optimizer.update(builder, spec);
  traits.ops = builder.take().ops;
  for (const Op& op : traits.ops) {
    const UpdateLocality locality = ops.at(op.kind).locality;
    traits.locality = std::max(traits.locality, locality);
    auto& whole = traits.whole_kinds;
    if (locality == UpdateLocality::matrix && std::find(whole.begin(), whole.end(), op.kind) == whole.end())
      whole.push_back(op.kind);
  }
  return traits;
}

}  // namespace quern
