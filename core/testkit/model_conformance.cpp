#include "quern/testkit/model_conformance.h"

#include <set>

#include "quern/error.h"

namespace quern::testkit {

namespace {

struct ModelPrograms {
  Program embed, block, head;
};

ModelPrograms write_programs(const Model& model, const std::vector<ParameterSpec>& parameters, DType dtype,
                             const std::vector<OpSpec>& custom_ops) {
  OpSet ops = builtin_ops();
  for (const OpSpec& spec : custom_ops) ops.add(spec);
  auto write = [&](const char* name, void (Model::*program)(ProgramBuilder&) const) {
    ProgramBuilder builder(name, {.ops = &ops, .parameters = parameters, .activation_dtype = dtype, .documents = true});
    (model.*program)(builder);
    return builder.take();
  };
  return {write("embed", &Model::embed), write("block", &Model::block), write("head", &Model::head)};
}

class Check {
 public:
  Check(const Model& model, DType dtype, const std::vector<OpSpec>& custom_ops)
      : traits_(model.traits()), parameters_(model.parameters()) {
    check_parameters();
    ModelPrograms programs = write_programs(model, parameters_, dtype, custom_ops);
    const Shape stream = {Dim::tokens(), traits_.width};
    check_ends(programs.embed, {}, stream);
    check_ends(programs.block, stream, stream);
    check_ends(programs.head, stream, {Dim::tokens()});
    check_uses(programs.embed, {ParameterGroup::embedding});
    check_uses(programs.block, {ParameterGroup::block});
    check_uses(programs.head, {ParameterGroup::head, ParameterGroup::embedding});
    for (const ParameterSpec& spec : parameters_)
      if (!used_.contains(spec.name)) fault(spec.name, "no program uses it");
  }
  std::vector<std::string> faults;

 private:
  void fault(const std::string& where, const std::string& what) { faults.push_back(where + ": " + what); }

  void check_parameters() {
    std::set<std::string> names, hf_names;
    for (const ParameterSpec& spec : parameters_) {
      if (!names.insert(spec.name).second) fault(spec.name, "declared twice");
      std::int64_t rows = 0;
      for (const ParameterPart& part : spec.parts) {
        rows += part.rows;
        if (part.rows < 1) fault(spec.name, "a part without rows");
        if (part.hf_name.empty()) fault(spec.name, "a part without a Hugging Face name");
        if (!hf_names.insert(part.hf_name).second) fault(spec.name, "Hugging Face name used twice: " + part.hf_name);
        bool per_layer = part.hf_name.find("{layer}") != std::string::npos;
        if (per_layer != (spec.group == ParameterGroup::block))
          fault(spec.name, "{layer} belongs in the names of block parameters only: " + part.hf_name);
      }
      for (std::int64_t extent : spec.extents)
        if (extent < 1) fault(spec.name, "has an extent below 1: " + to_string(spec.extents));
      if (spec.extents.empty() || rows != spec.extents[0])
        fault(spec.name, "rows of its parts do not sum up to " + to_string(spec.extents));
    }
    if (traits_.layers < 1 || traits_.width < 1 || traits_.vocabulary < 2 || traits_.max_positions < 1)
      fault("traits", "sizes below 1");
  }

  void check_ends(const Program& program, const Shape& in, const Shape& out) {
    if (program.inputs.size() != (in.empty() ? 0u : 1u))
      fault(program.name, "takes " + std::to_string(program.inputs.size()) + " streams");
    for (ValueId id : program.inputs)
      if (program[id].shape != in)
        fault(program.name, "takes " + to_string(program[id].shape) + ", expected " + to_string(in));
    for (ValueId id : program.outputs)
      if (program[id].shape != out)
        fault(program.name, "gives " + to_string(program[id].shape) + ", expected " + to_string(out));
  }

  void check_uses(const Program& program, const std::set<ParameterGroup>& allowed) {
    for (const Value& value : program.values) {
      if (value.role != Role::parameter) continue;
      used_.insert(value.parameter);
      for (const ParameterSpec& spec : parameters_)
        if (spec.name == value.parameter && !allowed.contains(spec.group))
          fault(program.name, "uses " + spec.name + ", which is of another group");
    }
  }

  ModelTraits traits_;
  std::vector<ParameterSpec> parameters_;
  std::set<std::string> used_;
};

}  // namespace

std::vector<std::string> model_faults(const Model& model, DType activation_dtype,
                                      const std::vector<OpSpec>& custom_ops) {
  try {
    return Check(model, activation_dtype, custom_ops).faults;
  } catch (const Error& error) {
    return {error.what()};
  }
}

std::string model_programs(const Model& model, const std::vector<OpSpec>& custom_ops) {
  const std::vector<ParameterSpec> parameters = model.parameters();
  ModelPrograms programs = write_programs(model, parameters, DType::bf16, custom_ops);
  return to_string(programs.embed) + to_string(programs.block) + to_string(programs.head);
}

std::int64_t parameter_count(const Model& model) {
  std::int64_t count = 0;
  for (const ParameterSpec& spec : model.parameters())
    count += spec.count() * (spec.group == ParameterGroup::block ? model.traits().layers : 1);
  return count;
}

}  // namespace quern::testkit
