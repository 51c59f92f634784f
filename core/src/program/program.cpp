#include "quern/program.h"

#include <algorithm>
#include <set>
#include <utility>

#include "quern/error.h"

namespace quern {

ValueId Program::add_value(Value value) {
  if (find(value.name) != kNoValue) {
    std::string base = value.name;
    for (int number = 2; find(value.name) != kNoValue; ++number) value.name = base + "." + std::to_string(number);
  }
  values.push_back(std::move(value));
  return static_cast<ValueId>(values.size() - 1);
}

ValueId Program::add_state(StateSpec spec) {
  if (name == "embed" || name == "head") spec.name = name + "." + spec.name;
  if (state(spec.name)) return find(spec.name);
  states.push_back(spec);
  return add_value({.name = spec.name,
                    .shape = Shape(spec.extents.begin(), spec.extents.end()),
                    .dtype = spec.dtype,
                    .role = Role::state});
}

const StateSpec* Program::state(std::string_view wanted) const {
  const auto it =
      std::find_if(states.begin(), states.end(), [&](const StateSpec& spec) { return spec.name == wanted; });
  return it == states.end() ? nullptr : &*it;
}

ValueId Program::find(std::string_view wanted) const {
  for (std::size_t i = 0; i < values.size(); ++i)
    if (values[i].name == wanted) return static_cast<ValueId>(i);
  return kNoValue;
}

int Program::producer(ValueId id) const {
  for (std::size_t i = 0; i < ops.size(); ++i)
    if (std::find(ops[i].outputs.begin(), ops[i].outputs.end(), id) != ops[i].outputs.end()) return static_cast<int>(i);
  return -1;
}

std::vector<int> Program::consumers(ValueId id) const {
  std::vector<int> readers;
  for (std::size_t i = 0; i < ops.size(); ++i)
    if (std::find(ops[i].inputs.begin(), ops[i].inputs.end(), id) != ops[i].inputs.end())
      readers.push_back(static_cast<int>(i));
  return readers;
}

void check_program(const Program& program) {
  std::set<std::string_view> names;
  for (const Value& value : program.values)
    if (!names.insert(value.name).second)
      fail_internal("program " + program.name, "two values are named " + value.name);
  auto in_range = [&](ValueId id) { return id >= 0 && id < static_cast<ValueId>(program.values.size()); };
  // States are updated in place and gradients may be added to by several ops; all other values are made once.
  std::set<ValueId> made;
  for (ValueId id = 0; id < static_cast<ValueId>(program.values.size()); ++id) {
    bool produced = program.producer(id) >= 0;
    Role role = program[id].role;
    if (!produced && role != Role::local) made.insert(id);
    if (role == Role::state) made.insert(id);
  }
  for (const Op& op : program.ops) {
    for (ValueId id : op.inputs) {
      if (id == kNoValue) continue;
      if (!in_range(id)) fail_internal("program " + program.name, op.kind + " reads a value that does not exist");
      if (!made.contains(id))
        fail_internal("program " + program.name, op.kind + " reads " + program[id].name + " before it is made");
    }
    for (ValueId id : op.outputs) {
      if (id == kNoValue) continue;
      if (!in_range(id)) fail_internal("program " + program.name, op.kind + " makes a value that does not exist");
      bool first = made.insert(id).second;
      if (!first && program[id].role != Role::state)
        fail_internal("program " + program.name,
                      program[id].name + " is made twice, by " + op.kind + " the second time");
    }
  }
  for (ValueId id : program.outputs)
    if (!made.contains(id)) fail_internal("program " + program.name, "its output is never made");
}

namespace {

std::string_view mark_of(Role role) {
  switch (role) {
    case Role::runtime: return "@";
    case Role::boundary: return "^";
    case Role::parameter:
    case Role::parameter_grad: return "$";
    case Role::state:
    case Role::observation: return "&";
    case Role::saved: return "!";
    case Role::local: return "%";
  }
  return "?";
}

std::string spelled(const Program& program, ValueId id) {
  return id == kNoValue ? "-" : std::string(mark_of(program[id].role)) + program[id].name;
}

std::string joined(const Program& program, const std::vector<ValueId>& ids) {
  std::string text;
  for (ValueId id : ids) text += (text.empty() ? "" : ", ") + spelled(program, id);
  return text;
}

/// " {eps = 1e-06}", or nothing.
std::string braced(const Attributes& attributes) {
  std::string constants;
  for (const auto& [name, value] : attributes.all())
    constants += (constants.empty() ? "" : ", ") + name + " = " + to_string(value);
  return constants.empty() ? "" : " {" + constants + "}";
}

}  // namespace

std::string to_string(const Program& program) {
  std::string text = "program " + program.name + "(" + joined(program, program.inputs) + ") -> " +
                     joined(program, program.outputs) + "\n";
  std::size_t width = 0;
  std::vector<std::pair<std::string, std::string>> lines;
  for (const Op& op : program.ops) {
    std::string line = joined(program, op.outputs) + " = " + op.kind + "(" + joined(program, op.inputs) + ")";
    line += braced(op.attributes);
    std::string note;
    if (!op.outputs.empty() && op.outputs[0] != kNoValue)
      note = to_string(program[op.outputs[0]].shape) + " " + std::string(name_of(program[op.outputs[0]].dtype));
    if (op.phase == Phase::recompute) note += ", again";
    if (op.phase == Phase::backward) note += ", backward";
    width = std::max(width, std::min<std::size_t>(line.size(), 100));
    lines.emplace_back(std::move(line), std::move(note));
  }
  for (const StateSpec& state : program.states) {
    if (state.written || state.advance.empty()) continue;  // the precision backend's, or constant
    std::string line = "&" + state.name + " = " + state.advance + "(&" + state.name +
                       (state.statistics.empty() ? "" : ", &" + state.statistics) + ")" + braced(state.attributes);
    lines.emplace_back(std::move(line), "once a step");
  }
  for (auto& [line, note] : lines) {
    if (line.size() < width) line.resize(width, ' ');
    text += "  " + line + "  # " + note + "\n";
  }
  return text;
}

}  // namespace quern
