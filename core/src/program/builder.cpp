#include "quern/builder.h"

#include <algorithm>
#include <utility>

#include "program/inputs.h"
#include "program/names.h"
#include "quern/error.h"
#include "quern/options.h"

namespace quern {

namespace {

Attributes layout_attributes(const HeadLayout& heads) {
  return {{"heads", heads.heads}, {"kv_heads", heads.kv_heads}, {"head_dim", heads.head_dim}};
}

}  // namespace

ProgramBuilder::ProgramBuilder(std::string program_name, const Context& context) : context_(context) {
  program_.name = std::move(program_name);
}

ValueId ProgramBuilder::stream(std::int64_t width) {
  ValueId id = program_.add_value({.name = "x",
                                   .shape = {Dim::tokens(), width},
                                   .dtype = context_.activation_dtype,
                                   .role = Role::boundary,
                                   .parameter = {}});
  program_.inputs.push_back(id);
  return id;
}

ValueId ProgramBuilder::input(std::string name, Shape shape, DType dtype, std::int64_t below) {
  Value value{
      .name = std::move(name), .shape = std::move(shape), .dtype = dtype, .role = Role::runtime, .below = below};
  if (const ValueId id = program_.find(value.name); id != kNoValue) {
    need_same_input(program_[id], value);
    return id;
  }
  return program_.add_value(std::move(value));
}

ValueId ProgramBuilder::tokens() { return input(names::kTokens, {Dim::tokens()}, DType::i32); }
ValueId ProgramBuilder::targets() { return input(names::kTargets, {Dim::tokens()}, DType::i32); }
ValueId ProgramBuilder::positions() { return input(names::kPositions, {Dim::tokens()}, DType::i32); }

ValueId ProgramBuilder::parameter(std::string_view name) {
  if (ValueId id = program_.find(name); id != kNoValue) return id;
  std::vector<std::string> names;
  for (const ParameterSpec& spec : context_.parameters) {
    if (spec.name == name)
      return program_.add_value({.name = spec.name,
                                 .shape = Shape(spec.extents.begin(), spec.extents.end()),
                                 .dtype = context_.activation_dtype,
                                 .role = Role::parameter,
                                 .parameter = spec.name});
    names.push_back(spec.name);
  }
  throw Error(ErrorCode::config, {.where = "program " + program_.name,
                                  .what = "uses a parameter that the model does not declare",
                                  .found = std::string(name),
                                  .expected = nearest_name(name, names),
                                  .next = "add it to the model's parameters()"});
}

std::vector<ValueId> ProgramBuilder::op(std::string kind, std::vector<ValueId> inputs, const std::string& name,
                                        Attributes attributes) {
  Op op{.kind = std::move(kind), .inputs = std::move(inputs), .outputs = {}, .attributes = std::move(attributes)};
  return append_op(program_, *context_.ops, context_.activation_dtype, std::move(op), name);
}

ValueId ProgramBuilder::embedding(ValueId tokens, std::string_view weight, std::string name) {
  return op("embedding", {tokens, parameter(weight)}, std::move(name))[0];
}

ValueId ProgramBuilder::linear(ValueId x, std::string_view weight, std::string name, std::string_view bias) {
  return op("linear", {x, parameter(weight), bias.empty() ? kNoValue : parameter(bias)}, std::move(name))[0];
}

ValueId ProgramBuilder::rms_norm(ValueId x, std::string_view weight, double eps, std::string name) {
  return op("rms_norm", {x, parameter(weight)}, std::move(name), {{"eps", eps}})[0];
}

ValueId ProgramBuilder::layer_norm(ValueId x, std::string_view weight, std::string_view bias, double eps,
                                   std::string name) {
  return op("layer_norm", {x, parameter(weight), parameter(bias)}, std::move(name), {{"eps", eps}})[0];
}

ValueId ProgramBuilder::head_norm(ValueId qkv, const HeadLayout& heads, std::string_view query_weight,
                                  std::string_view key_weight, double eps, std::string name) {
  Attributes attributes = layout_attributes(heads);
  attributes.set("eps", eps);
  const ValueId query = parameter(query_weight), key = parameter(key_weight);
  const Shape of_head{heads.head_dim};
  if (program_[query].shape != of_head || program_[key].shape != of_head) attributes.set("over", std::string("width"));
  return op("head_norm", {qkv, query, key}, std::move(name), std::move(attributes))[0];
}

ValueId ProgramBuilder::rope(ValueId qkv, const HeadLayout& heads, const RopeFrequencies& frequencies,
                             std::string name) {
  Attributes attributes = layout_attributes(heads);
  attributes.set("inverse_frequencies", frequencies.inverse);
  attributes.set("magnitude", frequencies.magnitude);
  return op("rope", {qkv, positions()}, std::move(name), std::move(attributes))[0];
}

ValueId ProgramBuilder::attention(ValueId qkv, const HeadLayout& heads, const AttentionOptions& options,
                                  std::string name) {
  Attributes attributes = layout_attributes(heads);
  attributes.set("mask", std::string(options.mask == AttentionMask::causal ? "causal" : "full"));
  attributes.set("scale", options.scale);
  if (options.window != 0) attributes.set("window", options.window);
  if (options.cap != 0) attributes.set("cap", options.cap);
  ValueId documents = context_.documents ? input(names::kDocuments, {Dim::tokens(1, 1)}, DType::i32) : kNoValue;
  return op("attention", {qkv, documents}, std::move(name), std::move(attributes))[0];
}

ValueId ProgramBuilder::add(ValueId a, ValueId b, std::string name) { return op("add", {a, b}, std::move(name))[0]; }
ValueId ProgramBuilder::scale(ValueId x, double factor, std::string name) {
  return op("scale", {x}, std::move(name), {{"factor", factor}})[0];
}
ValueId ProgramBuilder::swiglu(ValueId gate_up, std::string name) {
  return op("swiglu", {gate_up}, std::move(name))[0];
}
ValueId ProgramBuilder::geglu(ValueId gate_up, std::string name) { return op("geglu", {gate_up}, std::move(name))[0]; }
ValueId ProgramBuilder::gelu(ValueId x, Gelu form, std::string name) {
  return op("gelu", {x}, std::move(name), {{"approximation", std::string(form == Gelu::erf ? "erf" : "tanh")}})[0];
}

ValueId ProgramBuilder::lm_loss(ValueId x, std::string_view weight, std::string name, double cap) {
  Attributes attributes;
  if (cap != 0) attributes.set("cap", cap);
  return op("lm_loss", {x, parameter(weight), targets()}, std::move(name), std::move(attributes))[0];
}

ValueId ProgramBuilder::class_loss(ValueId logits, ValueId labels, double smoothing, std::string name) {
  return op("class_loss", {logits, labels}, std::move(name), {{"smoothing", smoothing}})[0];
}

ValueId ProgramBuilder::weigh(ValueId x, ValueId factors, std::string name) {
  return op("weigh", {x, factors}, std::move(name))[0];
}

ValueId ProgramBuilder::prepend(ValueId x, std::string_view tokens, std::string name) {
  return op("prepend", {x, parameter(tokens)}, std::move(name))[0];
}

ValueId ProgramBuilder::row_mean(ValueId x, std::int64_t first, std::int64_t count, std::string name) {
  return op("row_mean", {x}, std::move(name), {{"first", first}, {"count", count}})[0];
}

ValueId ProgramBuilder::state(StateSpec spec) {
  const std::string name = spec.name;
  auto refuse = [&](const std::string& what, const std::string& found, const std::string& expected) {
    throw Error(
        ErrorCode::config,
        {.where = "program " + program_.name + ", state " + name, .what = what, .found = found, .expected = expected});
  };
  if (spec.dtype != DType::f32) refuse("its dtype", std::string(name_of(spec.dtype)), "f32");
  if (!spec.statistics.empty() || spec.written)
    refuse("says what it advances by, or that ops write it", spec.statistics, "advance_by, and neither of these");
  if (!spec.advance.empty() && context_.ops->at(spec.advance).updates != std::vector<std::pair<int, int>>{{0, 0}})
    refuse("op " + spec.advance + " does not update it", "other `updates`", "output 0 is input 0");
  if (program_.find(name) != kNoValue) refuse("the program has a value of that name", name, "another name");
  const std::size_t known = program_.states.size();
  const ValueId value = program_.add_state(std::move(spec));
  if (program_.states.size() == known) refuse("the program has a state of that name", name, "another name");
  return value;
}

void ProgramBuilder::advance_by(ValueId state, ValueId statistics) {
  Value& sums = program_[statistics];
  const int producer = program_.producer(statistics);
  const bool are_sums =
      producer >= 0 && context_.ops->at(program_.ops[static_cast<std::size_t>(producer)].kind).statistics;
  auto spec = std::find_if(program_.states.begin(), program_.states.end(),
                           [&](const StateSpec& known) { return known.name == program_[state].name; });
  const bool is_real = sums.dtype == DType::f32 || sums.dtype == DType::f64;
  if (spec == program_.states.end() || !are_sums || !is_real || sums.role == Role::state)
    throw Error(ErrorCode::config, {.where = "program " + program_.name,
                                    .what = "no state advances by this",
                                    .found = program_[state].name + " by " + sums.name,
                                    .expected = "a value of state(), and f32 or f64 statistics of an op of its own"});
  if (program_.name == "embed" || program_.name == "head") sums.name = program_.name + "." + sums.name;
  sums.role = Role::state;
  spec->statistics = sums.name;
}

void ProgramBuilder::add_loss(ValueId value, double weight) {
  const ValueId counted = input(names::kTargets, program_[value].shape, DType::i32);
  append_loss_stats(program_, *context_.ops, {value, counted}, {{"weight", weight}, {"counts", std::int64_t{0}}});
}

void ProgramBuilder::output(ValueId value) { program_.outputs.push_back(value); }

Program ProgramBuilder::take() {
  if (program_.outputs.size() != 1)
    throw Error(ErrorCode::config, {.where = "program " + program_.name,
                                    .what = "number of outputs",
                                    .found = std::to_string(program_.outputs.size()),
                                    .expected = "1",
                                    .next = "call output() once"});
  check_program(program_);
  return std::move(program_);
}

}  // namespace quern
