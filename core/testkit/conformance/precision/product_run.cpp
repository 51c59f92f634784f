#include "conformance/precision/product_run.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

#include "program/passes/differentiate.h"
#include "quern/builder.h"
#include "quern/numeric.h"
#include "quern/quantized_format.h"
#include "quern/step_state.h"
#include "quern/weight_format.h"

namespace quern::conformance {

namespace {

using testkit::PoisonedTensor;

/// Half a unit in the last place, relative; of fp32 after a sum of some hundred terms, of int8 for normal numbers whose
/// largest magnitude is the range's end, with room.
double roundoff(DType dtype) {
  switch (dtype) {
    case DType::f32: return 0x1p-21;
    case DType::bf16: return 0x1p-9;
    case DType::e4m3: return 0x1p-4;
    case DType::e5m2: return 0x1p-3;
    case DType::i8: return 0x1p-6;
    default: return 0;
  }
}

/// Likewise. 4 bits of some hundred normal numbers, the largest of which is 2.7 deviations and 7 units, rounded by
/// chance: a unit over the root of 6.
double roundoff(const QuantizedFormat& format) {
  return format.dtype == DType::i8 && format.largest < 127 ? 2.7 / (std::sqrt(6) * format.largest)
                                                           : roundoff(format.dtype);
}

/// The format that an op or a copy says it brings values of the dtype to. Null: no row of the table.
const QuantizedFormat* stated_format(const Attributes& attributes, DType dtype) {
  if (!attributes.has("format")) return nullptr;
  const QuantizedFormat* format = quantized_format_named(attributes.word("format"));
  return format && format->dtype == dtype ? format : nullptr;
}

/// Of a format of weights, likewise: 4 bits for the largest of 32 normal numbers, ternary for the mean magnitude.
double roundoff(const WeightFormat& format) { return format.bits == 8 ? 0x1p-6 : format.bits == 4 ? 0.1 : 0.55; }

Program forward_program(ProductRun::What what, const ProductSize& size, const ProgramBuilder::Context& context) {
  // The head's name is what the core lowers losses under.
  ProgramBuilder builder(what == ProductRun::What::loss ? "head" : "block", context);
  ValueId x = builder.stream(size.in);
  builder.output(what == ProductRun::What::loss ? builder.lm_loss(x, "w")
                                                : builder.linear(x, "w", "y", size.bias ? "b" : ""));
  return builder.take();
}

}  // namespace

ProductRun::ProductRun(PluginHost& host, const PrecisionBackend& backend, Device& device, What what,
                       const ProductSize& size, Pass pass)
    : device_(device), what_(what), pass_(pass), geometry_{1, size.tokens}, ops_(builtin_ops()) {
  for (const OpSpec& spec : host.ops()) ops_.add(spec);
  const std::vector<ParameterSpec> parameters = {matrix("w", ParameterGroup::block, "w", size.out, size.in),
                                                 vector("b", ParameterGroup::block, "b", size.out, Init::Kind::zeros)};
  const DType activation = backend.traits().activation;
  Program forward = forward_program(what, size, {&ops_, parameters, activation, false});
  JointProgram joint{.program = forward};
  if (pass == Pass::training) joint = differentiate(forward, ops_, activation, DType::f32);
  for (Op& op : joint.program.ops)
    if (op.kind == "lm_loss_train") op.attributes.set("seed", double{kGradientSeed});
  lowered_ = lower_precision(std::move(joint), ops_, backend);
  const Program& program = lowered_.joint.program;
  read_ = read_values(program);
  if (lowered_.joint.gradient_out != kNoValue) read_[static_cast<std::size_t>(lowered_.joint.gradient_out)] = true;
  results_[what == What::loss ? "token_loss" : "y"] = program.outputs[0];
  if (pass == Pass::training) results_["dx"] = lowered_.joint.gradient_out;
  for (std::size_t i = 0; i < program.values.size(); ++i)
    if (program.values[i].role == Role::parameter_grad)
      results_[program.values[i].parameter == "w" ? "dweight" : "dbias"] = static_cast<ValueId>(i);
  note_formats();
  for (const Op& op : program.ops) {
    OpSupport support = device.query(instantiate(program, op, geometry_, read_));
    if (!support.refusal.empty()) throw Error(ErrorCode::config, {.where = "device cpu", .what = support.refusal});
  }
  for (const StateSpec& state : lowered_.joint.program.states) {
    PoisonedTensor& tensor = memory(program.find(state.name));
    std::memset(tensor.view().data, 0, tensor.view().bytes());
  }
}

void ProductRun::note_formats() {
  const Program& program = lowered_.joint.program;
  auto note = [&](const Attributes& attributes, ValueId id) {
    if (id == kNoValue) return;
    if (const QuantizedFormat* format = stated_format(attributes, program[id].dtype)) stated_[id] = format;
    const WeightFormat* weights = attributes.has("format") ? weight_format_named(attributes.word("format")) : nullptr;
    narrow_ = narrow_ || (weights && weights->bits < 8) || (stated_.contains(id) && stated_.at(id)->largest < 127);
  };
  for (const Op& op : program.ops)
    for (ValueId id : op.outputs) note(op.attributes, id);
  for (const WorkingCopy& copy : lowered_.working_copies)
    for (const Value& value : copy.values) note(copy.attributes, program.find(value.name));
}

PoisonedTensor& ProductRun::memory(ValueId id) {
  auto found = values_.find(id);
  if (found != values_.end()) return found->second;
  const Value& value = lowered_.joint.program[id];
  return values_.emplace(id, PoisonedTensor(value.dtype, extents_at(value.shape, geometry_))).first->second;
}

void ProductRun::launch(const OpInstance& instance, const std::vector<ValueId>& inputs,
                        const std::vector<ValueId>& outputs) {
  std::vector<View> in, out;
  for (ValueId id : inputs) in.push_back(id == kNoValue ? View{} : memory(id).view());
  for (std::size_t i = 0; i < outputs.size(); ++i)
    out.push_back(instance.outputs[i].present ? memory(outputs[i]).view() : View{});
  PoisonedTensor workspace(DType::u8, {static_cast<std::int64_t>(device_.query(instance).workspace_bytes)});
  Stream stream = device_.stream(StreamKind::compute);
  device_.prepare(instance)->launch(in, out, {stream, workspace.view().data});
  device_.synchronize(stream);
}

void ProductRun::fill(std::string_view name, const std::vector<float>& values) {
  const ValueId id = lowered_.joint.program.find(name);
  if (id == kNoValue) return;  // nothing reads it
  const View view = memory(id).view();
  memory(id) = PoisonedTensor(view.dtype, view.extents, values);
}

ProductResults ProductRun::run(const ProductInputs& inputs) {
  const Program& program = lowered_.joint.program;
  fill("x", inputs.x);
  fill("w", inputs.weight);
  fill("b", inputs.bias);
  if (what_ == What::linear) fill("d.out", inputs.dy);
  if (what_ == What::loss)
    std::memcpy(memory(program.find("targets")).view().data, inputs.targets.data(), 4 * inputs.targets.size());
  for (const WorkingCopy& copy : lowered_.working_copies) {
    const Extents extents{static_cast<std::int64_t>(inputs.weight.size()) / program[program.inputs[0]].shape[1].fixed,
                          program[program.inputs[0]].shape[1].fixed};
    PoisonedTensor master(DType::f32, extents, inputs.weight);
    OpInstance instance{.kind = copy.kind,
                        .inputs = {{DType::f32, extents, true, false}},
                        .attributes = copy.attributes,
                        .geometry = {}};
    std::vector<View> out;
    for (const Value& value : copy.values) {
      const ValueId id = program.find(value.name);  // none: nothing reads it
      const Extents shape = extents_at(value.shape, geometry_);
      instance.outputs.push_back({value.dtype, shape, id != kNoValue, false});
      out.push_back(id == kNoValue ? View{} : memory(id).view());
    }
    PoisonedTensor workspace(DType::u8, {static_cast<std::int64_t>(device_.query(instance).workspace_bytes)});
    const View in[] = {master.view()};
    const Stream stream = device_.stream(StreamKind::compute);
    device_.prepare(instance)->launch(in, out, {stream, workspace.view().data});
    device_.synchronize(stream);  // master and workspace end here
  }
  for (const Op& op : program.ops) launch(instantiate(program, op, geometry_, read_), op.inputs, op.outputs);
  ProductResults results;
  for (const auto& [name, id] : results_) results[name] = memory(id).floats();
  return results;
}

void ProductRun::advance_states() {
  for (const StateSpec& state : lowered_.joint.program.states) {
    if (state.advance.empty()) continue;
    const ValueId id = lowered_.joint.program.find(state.name);
    const Operand operand{state.dtype, state.extents, true, false};
    launch({.kind = state.advance,
            .inputs = {operand},
            .outputs = {operand},
            .attributes = state.attributes,
            .geometry = {}},
           {id}, {id});
  }
}

std::vector<ProductRun::Quantization> ProductRun::quantizations() {
  std::vector<Quantization> all;
  for (const Op& op : lowered_.joint.program.ops) {
    const OpSpec& spec = ops_.at(op.kind);
    if (!spec.quantized) continue;
    const View x = memory(op.inputs[0]).view();
    const std::vector<float> values = testkit::to_floats(x);
    for (const OpSpec::QuantizedOutput& output : spec.quantized(op.attributes)) {
      const ValueId code = op.outputs[output.codes];
      if (code == kNoValue || !read_[static_cast<std::size_t>(code)] || op.outputs[output.scale] == kNoValue) continue;
      const View q = memory(code).view();
      const std::vector<float> codes = testkit::to_floats(q),
                               scales = testkit::to_floats(memory(op.outputs[output.scale]).view());
      const std::size_t rows = static_cast<std::size_t>(q.extents[0]), columns = codes.size() / rows;
      const bool turned = q.extents != x.extents;
      if (q.dtype != DType::i8 || values.size() != codes.size() || (scales.size() != 1 && scales.size() != rows))
        continue;
      Quantization& made = all.emplace_back();
      if (const auto stated = stated_.find(code); stated != stated_.end()) made.largest = stated->second->largest;
      made.label = op.kind + " of " + lowered_.joint.program[op.inputs[0]].name;
      for (std::size_t i = 0; i < codes.size(); ++i) {
        const std::size_t row = i / columns, column = i % columns;
        made.exact.push_back(double{values[turned ? column * rows + row : i]} / scales[scales.size() == 1 ? 0 : row]);
        made.codes.push_back(codes[i]);
      }
    }
  }
  return all;
}

double ProductRun::error_bound(const std::string& result) const {
  const Program& program = lowered_.joint.program;
  std::set<ValueId> made{results_.at(result)};
  std::set<DType> words;
  std::set<const WeightFormat*> formats;
  for (std::size_t i = program.ops.size(); i-- > 0;) {
    const Op& op = program.ops[i];
    if (std::none_of(op.outputs.begin(), op.outputs.end(), [&](ValueId id) { return made.contains(id); })) continue;
    made.insert(op.inputs.begin(), op.inputs.end());
    for (const auto& [name, value] : op.attributes.all())
      if (const auto* word = std::get_if<std::string>(&value))
        if (auto dtype = dtype_named(*word))
          words.insert(*dtype);
        else if (const WeightFormat* format = weight_format_named(*word))
          formats.insert(format);
  }
  made.erase(kNoValue);
  double squares = 0;
  for (ValueId id : made) {
    const auto stated = stated_.find(id);
    squares += std::pow(stated == stated_.end() ? roundoff(program[id].dtype) : roundoff(*stated->second), 2);
  }
  for (DType dtype : words) squares += std::pow(roundoff(dtype), 2);
  for (const WeightFormat* format : formats) squares += std::pow(roundoff(*format), 2);
  // Logits and their gradients round inside the loss as well, in the formats of its operands.
  return (what_ == What::loss ? 2 : 1) * std::sqrt(squares);
}

std::string ProductRun::formats() const {
  std::set<std::string> names;
  const std::vector<Value>& values = lowered_.joint.program.values;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (size_of(values[i].dtype) != 1 || roundoff(values[i].dtype) == 0) continue;
    const auto stated = stated_.find(static_cast<ValueId>(i));
    names.emplace(stated == stated_.end() ? name_of(values[i].dtype) : stated->second->name);
  }
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text.empty() ? std::string(name_of(lowered_.joint.program[lowered_.joint.program.inputs[0]].dtype)) : text;
}

namespace {

/// Logits' gradients of a mean-less cross-entropy, and the losses of the tokens.
std::vector<float> softmax_gradients(const ProductSize& size, const ProductInputs& inputs, std::vector<float>& logits) {
  std::vector<float> losses;
  for (std::int64_t token = 0; token < size.tokens; ++token) {
    float* row = logits.data() + token * size.out;
    const std::int32_t target = inputs.targets[static_cast<std::size_t>(token)];
    const double largest = *std::max_element(row, row + size.out);
    double sum = 0;
    for (std::int64_t i = 0; i < size.out; ++i) sum += std::exp(row[i] - largest);
    losses.push_back(target < 0 ? 0.0f : static_cast<float>(largest + std::log(sum) - row[target]));
    for (std::int64_t i = 0; i < size.out; ++i)
      row[i] = target < 0 ? 0.0f : static_cast<float>(std::exp(row[i] - largest) / sum - (i == target ? 1.0 : 0.0));
  }
  return losses;
}

/// (rows, columns) of sum over k of a(row, k) b(k, column).
template <class A, class B>
std::vector<float> product(std::int64_t rows, std::int64_t columns, std::int64_t inner, A a, B b) {
  std::vector<float> result;
  for (std::int64_t row = 0; row < rows; ++row)
    for (std::int64_t column = 0; column < columns; ++column) {
      double sum = 0;
      for (std::int64_t k = 0; k < inner; ++k) sum += double{a(row, k)} * b(k, column);
      result.push_back(static_cast<float>(sum));
    }
  return result;
}

}  // namespace

ProductResults exact_product(ProductRun::What what, const ProductSize& size, const ProductInputs& inputs) {
  auto at = [](const std::vector<float>& matrix, std::int64_t columns, std::int64_t row, std::int64_t column) {
    return matrix[static_cast<std::size_t>(row * columns + column)];
  };
  const std::int64_t n = size.tokens, in = size.in, out = size.out;
  std::vector<float> y = product(
      n, out, in, [&](auto row, auto k) { return at(inputs.x, in, row, k); },
      [&](auto k, auto column) { return at(inputs.weight, in, column, k); });
  ProductResults results;
  std::vector<float> dy = inputs.dy;
  if (what == ProductRun::What::loss) {
    results["token_loss"] = softmax_gradients(size, inputs, y);
    dy = y;
  } else {
    for (std::size_t i = 0; size.bias && i < y.size(); ++i) y[i] += inputs.bias[i % static_cast<std::size_t>(out)];
    results["y"] = y;
    if (size.bias)
      results["dbias"] = product(
          1, out, n, [](auto, auto) { return 1.0f; }, [&](auto k, auto column) { return at(dy, out, k, column); });
  }
  results["dx"] = product(
      n, in, out, [&](auto row, auto k) { return at(dy, out, row, k); },
      [&](auto k, auto column) { return at(inputs.weight, in, k, column); });
  results["dweight"] = product(
      out, in, n, [&](auto row, auto k) { return at(dy, out, k, row); },
      [&](auto k, auto column) { return at(inputs.x, in, k, column); });
  return results;
}

}  // namespace quern::conformance
