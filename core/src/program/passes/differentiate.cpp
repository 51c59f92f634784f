#include "program/passes/differentiate.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "program/names.h"
#include "program/passes/rewrite.h"
#include "quern/error.h"

namespace quern {

namespace {

class Differentiator {
 public:
  Differentiator(const Program& forward, const OpSet& ops, DType activation, const WantedGradients& wanted)
      : ops_(ops), activation_(activation), wanted_(wanted) {
    joint_.program = forward;
  }

  JointProgram run() {
    Program& program = joint_.program;
    std::size_t forward_ops = program.ops.size();
    find_wanted();
    joint_.trains =
        std::any_of(program.outputs.begin(), program.outputs.end(), [&](ValueId id) { return wants(id); }) ||
        std::any_of(program.ops.begin(), program.ops.end(), [&](const Op& op) { return is_objective(op); });
    if (!joint_.trains) return std::move(joint_);
    const int loss = become_training_op();
    if (loss < 0 && !program.outputs.empty()) seed();
    for (std::size_t i = forward_ops; i-- > 0;)
      if (static_cast<int>(i) != loss) visit(i);  // a loss's gradients are made by the op itself
    if (loss >= 0) need_no_gradient(program.ops[static_cast<std::size_t>(loss)]);
    drop_frozen_gradients(wants_.size());
    collect_boundary();
    need_gradients();
    // Ops whose only results were gradients of frozen parameters.
    drop_unused(program, {&joint_.gradient_in, &joint_.gradient_out});
    return std::move(joint_);
  }

 private:
  bool is_trainable(const std::string& parameter) const { return !wanted_.trainable || wanted_.trainable(parameter); }
  bool is_wanted(const Value& value) const {
    if (value.role == Role::boundary) return wanted_.of_input;
    return value.role == Role::parameter && is_trainable(value.parameter);
  }
  bool wants(ValueId id) const { return id != kNoValue && wants_[static_cast<std::size_t>(id)]; }

  /// Whether it adds something that a parameter which trains has a part in to the objective.
  bool is_objective(const Op& op) const { return ops_.at(op.kind).objective && wants(op.inputs[0]); }

  /// Values that depend on what has a gradient.
  void find_wanted() {
    const Program& program = joint_.program;
    for (const Value& value : program.values) wants_.push_back(is_wanted(value));
    for (const Op& op : program.ops) {
      if (std::none_of(op.inputs.begin(), op.inputs.end(), [&](ValueId id) { return wants(id); })) continue;
      for (ValueId id : op.outputs)
        if (id != kNoValue) wants_[static_cast<std::size_t>(id)] = true;
    }
  }

  /// The gradient of a frozen parameter is an output like others that no op reads.
  void drop_frozen_gradients(std::size_t from) {
    for (std::size_t i = from; i < joint_.program.values.size(); ++i) {
      Value& value = joint_.program.values[i];
      if (value.role != Role::parameter_grad || is_trainable(value.parameter)) continue;
      value.role = Role::local;
      value.parameter.clear();
    }
  }

  /// Refuses the program unless it makes each wanted gradient.
  void need_gradients() {
    const Program& program = joint_.program;
    auto refuse = [&](const std::string& of) {
      throw Error(ErrorCode::config, {.where = "program " + program.name,
                                      .what = "an op states no gradient of what trains",
                                      .found = of,
                                      .next = "give the op a backward rule, or freeze the parameters before it"});
    };
    if (wanted_.of_input && !program.inputs.empty() && joint_.gradient_out == kNoValue)
      refuse("its input " + program[program.inputs[0]].name);
    std::set<std::string> made;
    for (const Value& value : program.values)
      if (value.role == Role::parameter_grad) made.insert(value.parameter);
    for (const Value& value : program.values)
      if (value.role == Role::parameter && is_wanted(value) && !made.contains(value.parameter)) refuse(value.name);
  }

  /// A loss that makes its own gradients takes none of its result: a term of the objective that reads it would be lost.
  void need_no_gradient(const Op& loss) const {
    if (!contributions_.contains(loss.outputs[0])) return;
    throw Error(ErrorCode::config, {.where = "program " + joint_.program.name,
                                    .what = "a term of the objective reads the result of the loss " + loss.kind,
                                    .found = joint_.program[loss.outputs[0]].name,
                                    .next = "make the term of what the loss reads"});
  }

  ValueId new_boundary_gradient() {
    const Value& stream = joint_.program[joint_.program.outputs[0]];
    return joint_.program.add_value(
        {.name = "d.out", .shape = stream.shape, .dtype = activation_, .role = Role::boundary, .parameter = {}});
  }

  void seed() {
    joint_.gradient_in = new_boundary_gradient();
    for (ValueId output : joint_.program.outputs)
      if (wants(output)) contributions_[output].push_back(joint_.gradient_in);
  }

  // A loss makes its gradients in the forward op itself. The index of that op, or -1.
  int become_training_op() {
    Program& program = joint_.program;
    const int index = program.outputs.empty() ? -1 : program.producer(program.outputs[0]);
    if (index < 0) return -1;
    Op& loss = program.ops[static_cast<std::size_t>(index)];
    const OpSpec& spec = ops_.at(loss.kind);
    if (spec.training_kind.empty()) return -1;
    Op training = loss;
    ValueId result = training.outputs[0];
    training.kind = spec.training_kind;
    std::vector<ValueId> made = append_op(program, ops_, activation_, training, program[result].name);
    // append_op made a second value for the loss; keep the first.
    program[made[0]].name += ".unused";
    program.ops.back().outputs[0] = result;
    program.ops[static_cast<std::size_t>(index)] = std::move(program.ops.back());
    program.ops.pop_back();
    for (auto [output, input] : spec.training_gradients) {
      ValueId source = program.ops[static_cast<std::size_t>(index)].inputs[static_cast<std::size_t>(input)];
      Value& gradient = program[made[static_cast<std::size_t>(output)]];
      gradient.name = "d." + program[source].name;
      if (program[source].role == Role::parameter) {
        gradient.role = Role::parameter_grad;
        gradient.parameter = program[source].parameter;
      } else if (wants(source)) {
        contributions_[source].push_back(made[static_cast<std::size_t>(output)]);
      }
    }
    return index;
  }

  /// The index of the matmul that makes the gradient of a linear of low rank; -1: another op makes it.
  int narrow_matmul(ValueId gradient) const {
    const int index = joint_.program.producer(gradient);
    if (index < 0) return -1;
    const Op& op = joint_.program.ops[static_cast<std::size_t>(index)];
    return op.kind == "linear_input_grad" && op.attributes.has(names::kLowRank) ? index : -1;
  }

  // The sum of what readers of `value` contributed, or kNoValue. Matmuls of low rank are added where they are made,
  // which takes one pass over the sum and no more memory.
  ValueId gradient_of(ValueId value) {
    auto it = contributions_.find(value);
    if (it == contributions_.end()) return kNoValue;
    std::vector<ValueId>& parts = it->second;
    auto& ops = joint_.program.ops;
    const auto narrow =
        std::stable_partition(parts.begin(), parts.end(), [this](ValueId part) { return narrow_matmul(part) < 0; });
    const std::vector<ValueId> late(narrow == parts.begin() ? narrow + 1 : narrow, parts.end());
    parts.resize(parts.size() - late.size());
    add_up(value, parts);
    for (const ValueId late_gradient : late) {
      const auto at = ops.begin() + narrow_matmul(late_gradient);
      Op op = std::move(*at);
      ops.erase(at);
      op.kind = "add_matmul";
      op.inputs = {parts[0], op.inputs[0], op.inputs[1]};
      op.attributes = {{"first", std::int64_t{0}}, {"factor", 1.0}, {"transpose_b", std::int64_t{0}}};
      ops.push_back(std::move(op));
      parts[0] = late_gradient;
    }
    return parts[0];
  }

  void add_up(ValueId value, std::vector<ValueId>& parts) {
    while (parts.size() > 1) {
      ValueId late = parts.back();
      parts.pop_back();
      ValueId early = parts.back();
      Op add{.kind = "add", .inputs = {late, early}, .outputs = {}, .attributes = {}, .phase = Phase::backward};
      parts.back() =
          append_op(joint_.program, ops_, activation_, std::move(add), "d." + joint_.program[value].name + ".sum")[0];
    }
  }

  void visit(std::size_t index) {
    Op op = joint_.program.ops[index];
    if (std::none_of(op.inputs.begin(), op.inputs.end(), [&](ValueId id) { return wants(id); })) return;
    std::vector<ValueId> gradients;
    bool any = is_objective(op);
    for (ValueId output : op.outputs) {
      gradients.push_back(output == kNoValue ? kNoValue : gradient_of(output));
      any = any || gradients.back() != kNoValue;
    }
    if (!any) return;
    const OpSpec& spec = ops_.at(op.kind);
    if (!spec.backward)
      throw Error(ErrorCode::config, {.where = "program " + joint_.program.name,
                                      .what = "op cannot be differentiated",
                                      .found = op.kind,
                                      .expected = {},
                                      .next = "use an op with a backward rule"});
    std::vector<ValueId> inputs = op.inputs;
    BackwardContext context(joint_.program, ops_, std::move(op), std::move(gradients), activation_);
    spec.backward(context);
    for (std::size_t i = 0; i < inputs.size(); ++i)
      if (context.input_grads()[i] != kNoValue && wants(inputs[i]))
        contributions_[inputs[i]].push_back(context.input_grads()[i]);
  }

  void collect_boundary() {
    for (ValueId input : joint_.program.inputs) {
      ValueId gradient = gradient_of(input);
      if (joint_.gradient_out != kNoValue && gradient != joint_.gradient_out)
        fail_internal("differentiate", joint_.program.name + " has inputs whose gradients differ");
      joint_.gradient_out = gradient;
    }
    if (joint_.gradient_out != kNoValue && joint_.gradient_out != joint_.gradient_in) {
      Value& out = joint_.program[joint_.gradient_out];
      out.role = Role::boundary;
    }
  }

  const OpSet& ops_;
  DType activation_;
  const WantedGradients& wanted_;
  JointProgram joint_;
  std::vector<bool> wants_;  // by value of the forward program
  std::map<ValueId, std::vector<ValueId>> contributions_;
};

}  // namespace

JointProgram differentiate(const Program& forward, const OpSet& ops, DType activation, DType gradient,
                           const WantedGradients& wanted) {
  JointProgram joint = Differentiator(forward, ops, activation, wanted).run();
  for (Value& value : joint.program.values)
    if (value.role == Role::parameter_grad) value.dtype = gradient;
  return joint;
}

}  // namespace quern
