#include "program/passes/rewrite.h"

#include <algorithm>
#include <set>
#include <utility>

namespace quern {

namespace {

bool has_effect(const Program& program, const Op& op, const std::vector<bool>& read) {
  return std::any_of(op.outputs.begin(), op.outputs.end(), [&](ValueId id) {
    return id != kNoValue && (read[static_cast<std::size_t>(id)] || program[id].role != Role::local);
  });
}

}  // namespace

void drop_unused(Program& program, const std::vector<ValueId*>& keep) {
  for (bool changed = true; changed;) {
    std::vector<bool> read = read_values(program);
    for (ValueId* id : keep)
      if (*id != kNoValue) read[static_cast<std::size_t>(*id)] = true;
    auto dead = std::remove_if(program.ops.begin(), program.ops.end(),
                               [&](const Op& op) { return !has_effect(program, op, read); });
    changed = dead != program.ops.end();
    program.ops.erase(dead, program.ops.end());
  }
  std::vector<bool> mentioned(program.values.size(), false);
  auto mention = [&](ValueId id) {
    if (id != kNoValue) mentioned[static_cast<std::size_t>(id)] = true;
  };
  for (const Op& op : program.ops) {
    for (ValueId id : op.inputs) mention(id);
    for (ValueId id : op.outputs) mention(id);
  }
  for (ValueId id : program.inputs) mention(id);
  for (ValueId id : program.outputs) mention(id);
  for (ValueId* id : keep) mention(*id);

  std::vector<ValueId> renumbered(program.values.size(), kNoValue);
  std::vector<Value> values;
  for (std::size_t i = 0; i < program.values.size(); ++i) {
    if (!mentioned[i]) continue;
    renumbered[i] = static_cast<ValueId>(values.size());
    values.push_back(std::move(program.values[i]));
  }
  program.values = std::move(values);
  auto renumber = [&](ValueId& id) {
    if (id != kNoValue) id = renumbered[static_cast<std::size_t>(id)];
  };
  for (Op& op : program.ops) {
    for (ValueId& id : op.inputs) renumber(id);
    for (ValueId& id : op.outputs) renumber(id);
  }
  for (ValueId& id : program.inputs) renumber(id);
  for (ValueId& id : program.outputs) renumber(id);
  for (ValueId* id : keep) renumber(*id);
}

bool order_ops(Program& program) {
  std::set<ValueId> made;
  for (const Op& op : program.ops)
    for (ValueId id : op.outputs)
      if (id != kNoValue && program[id].role != Role::state) made.insert(id);
  // `made` holds what some op still has to make; an op is ready when none of its inputs is in it.
  std::vector<bool> done(program.ops.size(), false);
  std::vector<Op> ordered;
  while (ordered.size() < program.ops.size()) {
    std::size_t next = 0;
    auto ready = [&](std::size_t i) {
      return !done[i] && std::none_of(program.ops[i].inputs.begin(), program.ops[i].inputs.end(),
                                      [&](ValueId id) { return id != kNoValue && made.contains(id); });
    };
    while (next < program.ops.size() && !ready(next)) ++next;
    if (next == program.ops.size()) return false;
    done[next] = true;
    for (ValueId id : program.ops[next].outputs) made.erase(id);
    ordered.push_back(program.ops[next]);
  }
  program.ops = std::move(ordered);
  return true;
}

}  // namespace quern
