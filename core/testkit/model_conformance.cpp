#include "quern/testkit/model_conformance.h"

#include <algorithm>
#include <map>
#include <set>

#include "hf/hf_weights.h"
#include "program/heads.h"
#include "quern/error.h"

namespace quern::testkit {

namespace {

class Writer {
 public:
  Writer(const Model& model, const std::vector<ParameterSpec>& parameters, DType dtype,
         const std::vector<OpSpec>& custom_ops)
      : model_(model), parameters_(parameters), dtype_(dtype), ops_(builtin_ops()) {
    for (const OpSpec& spec : custom_ops) ops_.add(spec);
  }
  Program embed() const {
    return write("embed", [this](ProgramBuilder& b) { model_.embed(b); });
  }
  Program block(std::int64_t layer) const {
    return write("block", [this, layer](ProgramBuilder& b) { model_.block(b, layer); });
  }
  Program head() const {
    return write("head", [this](ProgramBuilder& b) { model_.head(b); });
  }

 private:
  template <class Write>
  Program write(const char* name, Write write) const {
    ProgramBuilder builder(name,
                           {.ops = &ops_, .parameters = parameters_, .activation_dtype = dtype_, .documents = true});
    write(builder);
    return builder.take();
  }

  const Model& model_;
  const std::vector<ParameterSpec>& parameters_;
  DType dtype_;
  OpSet ops_;
};

class Check {
 public:
  Check(const Model& model, DType dtype, const std::vector<OpSpec>& custom_ops)
      : traits_(model.traits()), parameters_(model.parameters()), activation_(dtype) {
    check_parameters();
    const Writer writer(model, parameters_, dtype, custom_ops);
    const Shape stream = {Dim::tokens(), traits_.width};
    const Program embed = writer.embed(), head = writer.head();
    check_ends(embed, {}, stream);
    const ValueId targets = head.find("targets");
    if (targets == kNoValue) fault("head", "does not read the input targets");
    check_ends(head, stream, targets == kNoValue ? Shape{Dim::tokens()} : head[targets].shape);
    if (traits_.vocabulary < 2 && embed.find("tokens") != kNoValue) fault("traits", "tokens, and a vocabulary below 2");
    check_dtypes(embed);
    check_dtypes(head);
    check_uses(embed, {ParameterGroup::embedding});
    check_uses(head, {ParameterGroup::head, ParameterGroup::embedding});
    std::map<std::int64_t, std::string> kinds;  // kind -> its program
    for (std::int64_t layer = 0; layer < traits_.layers; ++layer) {
      const Program block = writer.block(layer);
      const std::string text = to_string(block);
      auto [kind, fresh] = kinds.try_emplace(model.block_kind(layer), text);
      if (kind->second != text)
        fault("block", "layer " + std::to_string(layer) + " differs from an earlier one of the same block_kind, " +
                           std::to_string(kind->first));
      if (!fresh) continue;
      check_ends(block, stream, stream);
      check_dtypes(block);
      check_uses(block, {ParameterGroup::block});
    }
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
        check_row_order(spec, part);
        if (const std::string heads = heads_fault(part); !heads.empty())
          fault(spec.name, "heads of " + part.hf_name + " " + heads);
        if (part.hf_name.empty()) fault(spec.name, "a part without a Hugging Face name");
        const bool in_block = spec.group == ParameterGroup::block;
        if ((part.hf_name.find("{layer}") != std::string::npos) != in_block)
          fault(spec.name, "{layer} belongs in the names of block parameters only: " + part.hf_name);
        for (std::int64_t layer = 0; layer < (in_block ? traits_.layers : 1); ++layer) {
          const std::string name = hf_tensor_name(part, layer);
          if (hf_names.insert(name).second) continue;
          fault(spec.name, "Hugging Face name used twice: " + name);
          break;
        }
      }
      for (std::int64_t extent : spec.extents)
        if (extent < 1) fault(spec.name, "has an extent below 1: " + to_string(spec.extents));
      if (spec.extents.empty() || rows != spec.extents[0])
        fault(spec.name, "rows of its parts do not sum up to " + to_string(spec.extents));
    }
    if (traits_.layers < 1 || traits_.width < 1 || traits_.vocabulary < 0 || traits_.max_positions < 1)
      fault("traits", "sizes below 1");
  }

  void check_row_order(const ParameterSpec& spec, const ParameterPart& part) {
    if (part.row_order.empty()) return;
    std::set<std::int64_t> rows(part.row_order.begin(), part.row_order.end());
    const auto count = static_cast<std::int64_t>(part.row_order.size());
    if (static_cast<std::int64_t>(rows.size()) != count || *rows.begin() != 0 || *rows.rbegin() != count - 1 ||
        part.rows % count != 0)
      fault(spec.name, "row_order of " + part.hf_name + " is no order of rows whose number divides the part's");
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

  /// Matmuls have operands of one dtype, and the residual stream and weights have the dtype of activations. The CPU
  /// device takes others too.
  void check_dtypes(const Program& program) {
    auto expect = [&](ValueId id, const std::string& what) {
      if (program[id].dtype != activation_)
        fault(program.name, what + " is " + std::string(name_of(program[id].dtype)) + ", expected " +
                                std::string(name_of(activation_)) + ", the dtype of activations");
    };
    for (const Op& op : program.ops)
      if (op.kind == "linear") expect(op.inputs[0], "operand " + program[op.inputs[0]].name + " of linear");
    if (program.name != "head")
      for (ValueId id : program.outputs) expect(id, "its output " + program[id].name);
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
  DType activation_;
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
  const Writer writer(model, parameters, DType::bf16, custom_ops);
  std::string text = to_string(writer.embed());
  std::set<std::int64_t> kinds;
  for (std::int64_t layer = 0; layer < model.traits().layers; ++layer) {
    const std::int64_t kind = model.block_kind(layer);
    text += "layer " + std::to_string(layer) + ": kind " + std::to_string(kind) + "\n";
    if (kinds.insert(kind).second) text += to_string(writer.block(layer));
  }
  return text + to_string(writer.head());
}

std::int64_t parameter_count(const Model& model) {
  std::int64_t count = 0;
  for (const ParameterSpec& spec : model.parameters())
    count += spec.count() * (spec.group == ParameterGroup::block ? model.traits().layers : 1);
  return count;
}

}  // namespace quern::testkit
