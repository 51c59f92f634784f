#include "transform/lora.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>
#include <vector>

#include "base/shorten.h"
#include "hf/hf_weights.h"
#include "program/names.h"
#include "quern/error.h"
#include "quern/step_state.h"
#include "transform/name_pattern.h"

namespace quern {

namespace {

constexpr std::string_view kWeight = ".weight";

std::string without(std::string_view text, std::string_view end) {
  return std::string(text.ends_with(end) ? text.substr(0, text.size() - end.size()) : text);
}

std::string last_part(const std::string& module) { return module.substr(module.rfind('.') + 1); }

/// Weights that linears of the layers read.
std::set<std::string> linear_weights(const Model& model, const OpSet& ops) {
  const std::vector<ParameterSpec> specs = model.parameters();
  std::set<std::string> weights;
  std::set<std::int64_t> kinds;
  for (std::int64_t layer = 0; layer < model.traits().layers; ++layer) {
    if (!kinds.insert(model.block_kind(layer)).second) continue;
    ProgramBuilder builder("block", {.ops = &ops, .parameters = specs});
    model.block(builder, layer);
    const Program program = builder.take();
    for (const Op& op : program.ops)
      if (op.kind == "linear" && program[op.inputs[1]].role == Role::parameter)
        weights.insert(program[op.inputs[1]].parameter);
  }
  return weights;
}

/// Which of the texts in the config name modules.
class TargetNames {
 public:
  TargetNames(const LoraOptions& options, std::int64_t layers)
      : options_(options), layers_(layers), used_(options.targets.size(), false) {}

  bool take(const std::string& module) {
    modules_.push_back(module);
    bool taken = false;
    for (std::size_t i = 0; i < used_.size(); ++i)
      if (names(options_.targets[i], module)) used_[i] = taken = true;
    return taken;
  }

  void need_all_used() const {
    for (std::size_t i = 0; i < used_.size(); ++i)
      if (!used_[i])
        throw Error(ErrorCode::config, {.where = options_.where,
                                        .what = "no linear of the layers has that name",
                                        .found = shortened(options_.targets[i]),
                                        .expected = std::string("modules among ") + known() + ", or " + kAllLinear});
  }

 private:
  bool names(const std::string& target, const std::string& module) const {
    if (target == kAllLinear) return true;
    if (!is_pattern(target)) return module == target || module.ends_with("." + target);
    std::int64_t count = 0;
    for (std::int64_t layer = 0; layer < layers_; ++layer)
      count += matches(target, hf_tensor_name({.hf_name = module}, layer));
    if (count > 0 && count < layers_)
      throw Error(ErrorCode::config, {.where = options_.where,
                                      .what = "matches " + module + " in " + std::to_string(count) + " of " +
                                              std::to_string(layers_) + " layers",
                                      .found = shortened(target),
                                      .expected = "all layers, or none"});
    return count > 0;
  }

  std::string known() const {
    std::string text;
    std::set<std::string> seen;
    for (const std::string& module : modules_)
      if (seen.insert(last_part(module)).second) text += (text.empty() ? "" : ", ") + last_part(module);
    return text;
  }

  const LoraOptions& options_;
  std::int64_t layers_;
  std::vector<bool> used_;
  std::vector<std::string> modules_;
};

ParameterSpec low_rank(std::string name, const std::string& module, const char* which, Extents extents, Init init) {
  ParameterSpec spec;
  spec.name = std::move(name);
  spec.extents = std::move(extents);
  ParameterPart part;
  part.hf_name = kPeftPrefix + module + "." + which + ".weight";
  part.rows = spec.extents[0];
  part.init = init;
  part.optional = true;
  spec.parts = {std::move(part)};
  spec.quantized = false;
  return spec;
}

// A is as wide as PEFT's uniform numbers (Kaiming, a = sqrt 5); B is zero, so that the model begins as it was.
LoraTarget target_of(const ParameterSpec& base, std::size_t index, std::int64_t first, std::int64_t rank) {
  const ParameterPart& part = base.parts[index];
  LoraTarget target{
      .base = base.name, .part = index, .first = first, .module = without(part.hf_name, kWeight), .a = {}, .b = {}};
  const std::string name = without(base.name, kWeight) + "." + last_part(target.module);
  const std::int64_t in = base.columns();
  target.a = low_rank(name + ".lora_A", target.module, "lora_A", {rank, in},
                      {Init::Kind::normal, 1 / std::sqrt(3.0 * static_cast<double>(in))});
  target.b = low_rank(name + ".lora_B", target.module, "lora_B", {part.rows, rank}, {Init::Kind::zeros, 0});
  target.b.parts[0].row_order = part.row_order;
  target.b.parts[0].heads = part.heads;
  return target;
}

}  // namespace

bool is_adapter(const ParameterSpec& spec) {
  return !spec.parts.empty() && spec.parts[0].hf_name.starts_with(kPeftPrefix);
}

LoraModel::LoraModel(std::unique_ptr<Model> model, const OpSet& ops, const LoraOptions& options)
    : ModelTransform(std::move(model)), factor_(options.factor), dropout_(options.dropout) {
  const std::set<std::string> linears = linear_weights(base(), ops);
  TargetNames names(options, traits().layers);
  for (const ParameterSpec& spec : base().parameters()) {
    if (spec.group != ParameterGroup::block || !linears.contains(spec.name)) continue;
    std::int64_t first = 0;
    for (std::size_t i = 0; i < spec.parts.size(); ++i) {
      if (const std::string module = without(spec.parts[i].hf_name, kWeight); names.take(module))
        targets_.push_back(target_of(spec, i, first, options.rank));
      else
        other_modules_.push_back(module);
      first += spec.parts[i].rows;
    }
  }
  names.need_all_used();
}

std::vector<std::string> LoraModel::target_modules() const {
  std::vector<std::string> names;
  for (const LoraTarget& target : targets_) {
    std::size_t dot = target.module.rfind('.');
    auto is_others = [&](const std::string& name) {
      return std::any_of(other_modules_.begin(), other_modules_.end(),
                         [&](const std::string& other) { return other.ends_with("." + name); });
    };
    while (dot != std::string::npos && is_others(target.module.substr(dot + 1)))
      dot = target.module.rfind('.', dot - 1);
    const std::string name = target.module.substr(dot + 1);
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  return names;
}

bool LoraModel::targets_are_transposed() const {
  const std::vector<ParameterSpec> specs = base().parameters();
  return std::any_of(targets_.begin(), targets_.end(), [&](const LoraTarget& target) {
    auto it = std::find_if(specs.begin(), specs.end(), [&](const auto& spec) { return spec.name == target.base; });
    return it->parts[target.part].transposed;
  });
}

void LoraModel::merge(const LoraTarget& target, std::span<const float> a, std::span<const float> b, std::int64_t first,
                      std::span<float> values) const {
  const std::int64_t columns = target.a.columns(), rank = target.a.extents[0];
  const auto end = first + static_cast<std::int64_t>(values.size());
  std::vector<double> row(static_cast<std::size_t>(columns));
  for (std::int64_t r = first / columns; r * columns < end; ++r) {
    std::fill(row.begin(), row.end(), 0.0);
    for (std::int64_t k = 0; k < rank; ++k) {
      const double weight = factor_ * b[static_cast<std::size_t>(r * rank + k)];
      const float* narrow = a.data() + k * columns;
      for (std::int64_t c = 0; c < columns; ++c) row[static_cast<std::size_t>(c)] += weight * narrow[c];
    }
    const std::int64_t from = std::max(first, r * columns), to = std::min(end, (r + 1) * columns);
    for (std::int64_t i = from; i < to; ++i) {
      float& value = values[static_cast<std::size_t>(i - first)];
      value = static_cast<float>(value + row[static_cast<std::size_t>(i - r * columns)]);
    }
  }
}

std::vector<ParameterSpec> LoraModel::parameters() const {
  std::vector<ParameterSpec> specs = base().parameters();
  for (ParameterSpec& spec : specs) spec.trainable = false;
  for (const LoraTarget& target : targets_) {
    specs.push_back(target.a);
    specs.push_back(target.b);
  }
  return specs;
}

void LoraModel::block(ProgramBuilder& b, std::int64_t layer) const {
  base().block(b, layer);
  b.replace(adapted(b.take(), b.context()));
}

Program LoraModel::adapted(const Program& program, const ProgramBuilder::Context& context) const {
  Program result = program;
  result.ops.clear();
  std::vector<ValueId> now(program.values.size());
  for (std::size_t i = 0; i < now.size(); ++i) now[i] = static_cast<ValueId>(i);
  auto add = [&](std::string kind, std::vector<ValueId> inputs, const std::string& name, Attributes attributes = {}) {
    return append_op(result, *context.ops, context.activation_dtype,
                     {.kind = std::move(kind), .inputs = std::move(inputs), .attributes = std::move(attributes)},
                     name)[0];
  };
  auto weight = [&](const ParameterSpec& spec) {
    return result.add_value({.name = spec.name,
                             .shape = Shape(spec.extents.begin(), spec.extents.end()),
                             .dtype = context.activation_dtype,
                             .role = Role::parameter,
                             .parameter = spec.name});
  };
  auto dropped = [&](ValueId x, std::size_t target, const std::string& name) {
    if (dropout_ == 0) return x;
    ValueId step = result.find(names::kStep);
    if (step == kNoValue)
      step = result.add_value({.name = names::kStep,
                               .shape = {std::int64_t{sizeof(StepState) / 4}},
                               .dtype = DType::u32,
                               .role = Role::runtime});
    return add("dropout", {x, step}, name, {{"probability", dropout_}, {"object", static_cast<std::int64_t>(target)}});
  };
  for (Op op : program.ops) {
    for (ValueId& id : op.inputs)
      if (id != kNoValue) id = now[static_cast<std::size_t>(id)];
    result.ops.push_back(op);
    if (op.kind != "linear") continue;
    const ValueId y = op.outputs[0];
    const std::string name = program[y].name;
    ValueId sum = y;
    for (std::size_t i = 0; i < targets_.size(); ++i) {
      const LoraTarget& target = targets_[i];
      if (target.base != result[op.inputs[1]].parameter) continue;
      if (sum == y) result[y].name = name + ".base";
      const std::string branch = name + "." + last_part(target.module);
      const ValueId narrow = add("linear", {dropped(op.inputs[0], i, branch + ".dropped"), weight(target.a), kNoValue},
                                 branch + ".lora_A", {{names::kLowRank, std::int64_t{1}}});
      sum = add("add_matmul", {sum, narrow, weight(target.b)}, branch + ".sum",
                {{"first", target.first}, {"factor", factor_}, {"transpose_b", std::int64_t{1}}});
    }
    if (sum != y) result[sum].name = name;
    now[static_cast<std::size_t>(y)] = sum;
  }
  for (ValueId& id : result.outputs) id = now[static_cast<std::size_t>(id)];
  check_program(result);
  return result;
}

}  // namespace quern
