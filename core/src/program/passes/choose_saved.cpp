#include "program/passes/choose_saved.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "program/passes/rewrite.h"
#include "quern/error.h"

namespace quern {

namespace {

const Op* forward_producer(const Program& program, ValueId id) {
  int index = id == kNoValue ? -1 : program.producer(id);
  if (index < 0 || program.ops[static_cast<std::size_t>(index)].phase != Phase::forward) return nullptr;
  return &program.ops[static_cast<std::size_t>(index)];
}

void take_outputs(const Program& program, const Op& op, std::set<std::string>& names) {
  for (ValueId id : op.outputs)
    if (id != kNoValue) names.insert(program[id].name);
}

// The values on the way from a norm (or anything that is not part of a projection) to `id`.
void take_projection(const Program& program, const OpSet& ops, ValueId id, std::set<std::string>& names) {
  const Op* op = forward_producer(program, id);
  if (!op) return;
  const OpClass op_class = ops.at(op->kind).op_class;
  if (op_class != OpClass::other && op_class != OpClass::conversion) return;
  take_outputs(program, *op, names);
  for (ValueId input : op->inputs) take_projection(program, ops, input, names);
}

class Partition {
 public:
  Partition(const JointProgram& joint, const OpSet& ops, const std::set<std::string>& recomputed)
      : joint_(joint), ops_(ops), recomputed_(recomputed) {}

  PartitionedProgram run() {
    choose();
    return {half(Phase::forward), half(Phase::backward), saved_names()};
  }

 private:
  const Program& program() const { return joint_.program; }

  bool enters(ValueId id) const {
    return std::find(program().inputs.begin(), program().inputs.end(), id) != program().inputs.end();
  }

  // Decides for one forward value that the backward phase needs: keep it, or mark its producer for recomputation.
  void need(ValueId id) {
    if (id == kNoValue || saved_.contains(id)) return;
    const Value& value = program()[id];
    if (enters(id)) saved_.insert(id);
    if (value.role != Role::local) return;
    int producer = program().producer(id);
    const Op& op = program().ops[static_cast<std::size_t>(producer)];
    if (op.phase != Phase::forward) return;
    bool several = std::count_if(op.inputs.begin(), op.inputs.end(), [&](ValueId in) { return enters(in); }) > 1;
    if (!recomputed_.contains(value.name) || several) {
      saved_.insert(id);
      return;
    }
    if (!recomputed_ops_.insert(producer).second) return;
    if (const auto& form = ops_.at(op.kind).recompute) {
      saved_.insert(op.outputs[static_cast<std::size_t>(form->kept_output)]);
      return need(op.inputs[0]);
    }
    for (ValueId input : op.inputs) need(input);
  }

  void choose() {
    for (const Op& op : program().ops)
      if (op.phase == Phase::backward)
        for (ValueId id : op.inputs) need(id);
  }

  std::vector<std::string> saved_names() const {
    std::vector<std::string> names;
    for (ValueId id : saved_) names.push_back(program()[id].name);
    return names;
  }

  Program half(Phase phase) const {
    Program half = program();
    half.name += phase == Phase::forward ? ".forward" : ".backward";
    half.ops.clear();
    for (ValueId id : saved_) half[id].role = Role::saved;
    if (phase == Phase::forward) {
      for (const Op& op : program().ops)
        if (op.phase == Phase::forward) half.ops.push_back(op);
    } else {
      add_recomputation(half);
      for (const Op& op : program().ops)
        if (op.phase == Phase::backward) half.ops.push_back(op);
      half.inputs.clear();
      half.outputs.clear();
      if (joint_.gradient_in != kNoValue) half.inputs = {joint_.gradient_in};
      if (joint_.gradient_out != kNoValue) half.outputs = {joint_.gradient_out};
    }
    drop_unused(half);
    check_program(half);
    return half;
  }

  void add_recomputation(Program& half) const {
    for (int index : recomputed_ops_) {
      Op op = program().ops[static_cast<std::size_t>(index)];
      op.phase = Phase::recompute;
      if (const auto& form = ops_.at(op.kind).recompute) {
        auto kept = op.outputs.begin() + form->kept_output;
        op.kind = form->kind;
        op.inputs = {op.inputs[0], *kept};
        op.outputs.erase(kept);
      }
      for (ValueId& id : op.outputs) {
        if (id == kNoValue || !saved_.contains(id)) continue;
        Value spare = half[id];  // kept from the forward pass: the second copy goes unread
        spare.role = Role::local;
        spare.name += ".again";
        id = half.add_value(std::move(spare));
      }
      half.ops.push_back(std::move(op));
    }
  }

  const JointProgram& joint_;
  const OpSet& ops_;
  const std::set<std::string>& recomputed_;
  std::set<ValueId> saved_;
  std::set<int> recomputed_ops_;  // forward ops that run again, in order
};

}  // namespace

std::set<std::string> recomputed_values(const JointProgram& joint, const OpSet& ops,
                                        const std::vector<std::string>& recompute) {
  const Program& program = joint.program;
  auto wants = [&](const char* name) { return std::find(recompute.begin(), recompute.end(), name) != recompute.end(); };
  for (const std::string& name : recompute)
    if (std::find(kRecomputeNames.begin(), kRecomputeNames.end(), name) == kRecomputeNames.end())
      fail_internal("recomputed_values", "unknown name " + name);
  std::set<std::string> names;
  for (const Op& op : program.ops) {
    if (op.phase != Phase::forward) continue;
    const OpClass op_class = ops.at(op.kind).op_class;
    const bool activation = op_class == OpClass::activation, attention = op_class == OpClass::attention;
    if (wants("block")) take_outputs(program, op, names);
    if (activation && (wants("swiglu") || wants("ffn"))) take_outputs(program, op, names);
    if (activation && wants("ffn")) take_projection(program, ops, op.inputs[0], names);
    if (op_class == OpClass::norm && wants("norm")) names.insert(program[op.outputs[0]].name);
    if (attention && (wants("qkv") || wants("att"))) take_projection(program, ops, op.inputs[0], names);
    if (attention && wants("att")) take_outputs(program, op, names);
  }
  // What a lowering derived from a recomputed value alone (its quantized or transposed form) goes with it.
  for (const Op& op : program.ops) {
    if (op.phase != Phase::forward || ops.at(op.kind).op_class != OpClass::conversion) continue;
    if (op.inputs[0] != kNoValue && names.contains(program[op.inputs[0]].name)) take_outputs(program, op, names);
  }
  return names;
}

PartitionedProgram partition(const JointProgram& joint, const OpSet& ops, const std::set<std::string>& recomputed) {
  return Partition(joint, ops, recomputed).run();
}

std::vector<std::set<std::string>> recompute_path(const JointProgram& joint, const OpSet& ops,
                                                  const std::function<double(const Value&)>& bytes,
                                                  const std::function<double(const Program&)>& backward_seconds) {
  struct Trial {
    double bytes, seconds;
  };
  auto measure = [&](const std::set<std::string>& recomputed) {
    PartitionedProgram split = partition(joint, ops, recomputed);
    double total = 0;
    for (const std::string& name : split.saved) total += bytes(split.forward[split.forward.find(name)]);
    return Trial{total, backward_seconds(split.backward)};
  };
  // An op runs again unless all its results that are needed are kept, so they are kept or recomputed together.
  std::vector<std::set<std::string>> candidates;
  for (const Op& op : joint.program.ops) {
    if (op.phase != Phase::forward) continue;
    candidates.emplace_back();
    take_outputs(joint.program, op, candidates.back());
  }
  std::vector<std::set<std::string>> path = {recomputed_values(joint, ops, {"block"})};
  Trial now = measure(path.back());
  while (true) {
    std::set<std::string> best;
    double best_rate = 0;
    Trial best_trial{};
    for (const std::set<std::string>& results : candidates) {
      std::set<std::string> fewer;
      std::set_difference(path.back().begin(), path.back().end(), results.begin(), results.end(),
                          std::inserter(fewer, fewer.end()));
      if (fewer.size() == path.back().size()) continue;
      Trial trial = measure(fewer);
      double gain = now.seconds - trial.seconds, price = trial.bytes - now.bytes;
      if (gain <= 0) continue;
      double rate = price <= 0 ? gain * 1e30 : gain / price;
      if (rate > best_rate) best = std::move(fewer), best_rate = rate, best_trial = trial;
    }
    if (best_rate == 0) return path;
    path.push_back(std::move(best));
    now = best_trial;
  }
}

}  // namespace quern
