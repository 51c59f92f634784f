#include "program/passes/lower_precision.h"

#include <algorithm>
#include <utility>

#include "program/passes/rewrite.h"
#include "quern/error.h"

namespace quern {

namespace {

class LoweringPass final : public Lowering {
 public:
  LoweringPass(JointProgram joint, const OpSet& ops, const PrecisionBackend& backend) : ops_(ops), backend_(backend) {
    lowered_.joint = std::move(joint);
    training_ = lowered_.joint.trains;
  }

  LoweredProgram run() {
    Program& program = lowered_.joint.program;
    for (index_ = 0; index_ < program.ops.size(); ++index_) {
      if (auto product = ops_.at(program.ops[index_].kind).product) lower(*product, Op(program.ops[index_]));
    }
    drop_unused(program, {&lowered_.joint.gradient_in, &lowered_.joint.gradient_out});
    check_program(program);
    return std::move(lowered_);
  }

  // ---- Lowering ----
  const Program& program() const override { return lowered_.joint.program; }
  bool training() const override { return training_; }

  std::vector<ValueId> emit(std::string kind, std::vector<ValueId> inputs, Attributes attributes,
                            std::string name) override {
    Program& program = lowered_.joint.program;
    for (const Op& op : program.ops)
      if (op.kind == kind && op.inputs == inputs && op.attributes == attributes) return op.outputs;
    std::size_t place = 0;
    Phase phase = Phase::forward;
    auto is_parameter = [&](ValueId id) { return id == kNoValue || program[id].role == Role::parameter; };
    if (std::all_of(inputs.begin(), inputs.end(), is_parameter)) place = index_, phase = program.ops[index_].phase;
    for (ValueId id : inputs) {
      int producer = id == kNoValue ? -1 : program.producer(id);
      if (producer >= 0) place = std::max(place, static_cast<std::size_t>(producer) + 1);
      if (producer >= 0 && program.ops[static_cast<std::size_t>(producer)].phase == Phase::backward)
        phase = Phase::backward;
      if (id != kNoValue && id == lowered_.joint.gradient_in) phase = Phase::backward;
    }
    while (phase == Phase::backward && place < program.ops.size() && program.ops[place].phase == Phase::forward)
      ++place;
    std::vector<ValueId> outputs = append_op(program, ops_, backend_.traits().activation,
                                             {.kind = std::move(kind),
                                              .inputs = std::move(inputs),
                                              .outputs = {},
                                              .attributes = std::move(attributes),
                                              .phase = phase},
                                             name);
    std::rotate(program.ops.begin() + static_cast<std::ptrdiff_t>(place), program.ops.end() - 1, program.ops.end());
    if (place <= index_) ++index_;
    return outputs;
  }

  void produce(std::string kind, std::vector<ValueId> inputs, Attributes attributes) override {
    Op& op = lowered_.joint.program.ops[index_];
    op.kind = std::move(kind);
    op.inputs = std::move(inputs);
    op.attributes = std::move(attributes);
  }

  ValueId state(StateSpec spec) override {
    spec.written = true;
    return lowered_.joint.program.add_state(std::move(spec));
  }

  std::vector<ValueId> working_copy(std::string_view parameter, std::string kind, Attributes attributes) override {
    Program& program = lowered_.joint.program;
    for (const WorkingCopy& copy : lowered_.working_copies) {
      if (copy.parameter != parameter || copy.kind != kind || copy.attributes != attributes) continue;
      std::vector<ValueId> ids;
      for (const Value& value : copy.values) ids.push_back(program.find(value.name));
      return ids;
    }
    ValueId source = program.find(parameter);
    std::vector<ValueId> ids = append_op(program, ops_, backend_.traits().activation,
                                         {.kind = kind, .inputs = {source}, .outputs = {}, .attributes = attributes},
                                         std::string(parameter) + "." + kind);
    program.ops.pop_back();  // the op runs in the update program; here its results are operands
    WorkingCopy copy{std::string(parameter), std::move(kind), std::move(attributes), {}};
    for (ValueId id : ids) {
      program[id].role = Role::parameter;
      program[id].parameter = parameter;
      copy.values.push_back(program[id]);
    }
    lowered_.working_copies.push_back(std::move(copy));
    return ids;
  }

 private:
  void lower(Product product, const Op& op) {
    ProductSite site{.product = product, .result = op.outputs[0]};
    const std::vector<ValueId>& in = op.inputs;
    ValueId weight = in[1];
    switch (product) {
      case Product::output: site.x = in[0], site.weight = in[1], site.bias = in[2]; break;
      case Product::input_gradient: site.dy = in[0], site.weight = in[1]; break;
      case Product::weight_gradient: site.dy = in[0], site.x = in[1], weight = in[2]; break;
      case Product::loss: site.x = in[0], site.weight = in[1], site.op = &op; break;
    }
    std::string parameter = program()[weight].parameter;
    site.parameter = parameter;
    backend_.lower(site, *this);
    const std::string& kind = program().ops[index_].kind;
    if (product != Product::loss && ops_.at(kind).product)
      fail_internal("precision backend", "left " + kind + " of " + parameter + " as it was");
  }

  const OpSet& ops_;
  const PrecisionBackend& backend_;
  LoweredProgram lowered_;
  std::size_t index_ = 0;
  bool training_ = false;
};

}  // namespace

LoweredProgram lower_precision(JointProgram joint, const OpSet& ops, const PrecisionBackend& backend) {
  return LoweringPass(std::move(joint), ops, backend).run();
}

}  // namespace quern
