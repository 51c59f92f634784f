// Fusion patterns: their text form, and the op kind that a pattern stands for.
#include <algorithm>
#include <cctype>
#include <utility>

#include "program/passes/fuse.h"
#include "quern/error.h"

namespace quern {

namespace {

class PatternParser {
 public:
  PatternParser(const Fusion& fusion, const OpSet& ops) : fusion_(fusion), ops_(ops), rest_(fusion.pattern) {
    pattern_.kind = fusion.kind;
  }

  FusionPattern run() {
    do {
      parse_part();
    } while (accept(';'));
    if (!rest_.empty()) refuse("end of the pattern");
    return std::move(pattern_);
  }

 private:
  [[noreturn]] void refuse(const std::string& expected) const {
    throw Error(ErrorCode::config, {.where = "fusion " + fusion_.kind,
                                    .what = "pattern cannot be read",
                                    .found = rest_.empty() ? "its end" : "`" + std::string(rest_) + "`",
                                    .expected = expected,
                                    .next = "correct the device's fusions()"});
  }

  void skip_space() {
    while (!rest_.empty() && rest_.front() == ' ') rest_.remove_prefix(1);
  }

  bool accept(char c) {
    skip_space();
    if (rest_.empty() || rest_.front() != c) return false;
    rest_.remove_prefix(1);
    return true;
  }

  std::string word() {
    skip_space();
    std::size_t length = 0;
    while (length < rest_.size() && (std::isalnum(static_cast<unsigned char>(rest_[length])) || rest_[length] == '_'))
      ++length;
    if (length == 0) refuse("a name");
    std::string text(rest_.substr(0, length));
    rest_.remove_prefix(length);
    return text;
  }

  int index_of(const std::string& name) {
    auto it = std::find(pattern_.names.begin(), pattern_.names.end(), name);
    if (it == pattern_.names.end()) it = pattern_.names.insert(pattern_.names.end(), name);
    return static_cast<int>(it - pattern_.names.begin());
  }

  void parse_part() {
    std::vector<std::string> results;
    do results.push_back(word());
    while (accept(','));
    if (std::find(results.begin(), results.end(), "_") != results.end()) refuse("results that have names");
    if (!accept('=')) refuse("`=`");
    FusionPattern::Part part{.kind = word(), .inputs = {}, .outputs = {}};
    const OpSpec& spec = ops_.at(part.kind);
    if (results.size() != spec.outputs.size()) refuse(std::to_string(spec.outputs.size()) + " results of " + part.kind);
    if (!accept('(')) refuse("`(`");
    do {
      const std::string text = word();
      if (text == "_") {
        part.inputs.push_back(FusionPattern::kAbsent);
        continue;
      }
      int name = index_of(text);
      part.inputs.push_back(name);
      bool made = std::find(pattern_.outputs.begin(), pattern_.outputs.end(), name) != pattern_.outputs.end();
      if (!made && std::find(pattern_.inputs.begin(), pattern_.inputs.end(), name) == pattern_.inputs.end())
        pattern_.inputs.push_back(name);
    } while (accept(','));
    if (!accept(')')) refuse("`)`");
    while (!part.inputs.empty() && part.inputs.back() == FusionPattern::kAbsent) part.inputs.pop_back();
    for (const std::string& result : results) {
      int name = index_of(result);
      part.outputs.push_back(name);
      pattern_.outputs.push_back(name);
    }
    pattern_.parts.push_back(std::move(part));
  }

  const Fusion& fusion_;
  const OpSet& ops_;
  std::string_view rest_;
  FusionPattern pattern_;
};

int position(const std::vector<int>& list, int name) {
  auto it = std::find(list.begin(), list.end(), name);
  return it == list.end() ? -1 : static_cast<int>(it - list.begin());
}

/// The whole's inputs that an output of part `p` may take over where the part may overwrite its `input`: that value, or
/// where another part makes it, what that one may overwrite for it. Only what no later part reads.
std::vector<int> overwritten(const FusionPattern& pattern, const std::vector<OpSpec>& parts, std::size_t p, int input) {
  const std::vector<int>& inputs = pattern.parts[p].inputs;
  if (static_cast<std::size_t>(input) >= inputs.size()) return {};  // absent
  const int name = inputs[static_cast<std::size_t>(input)];
  for (std::size_t later = p + 1; later < pattern.parts.size(); ++later)
    if (position(pattern.parts[later].inputs, name) >= 0) return {};
  if (const int outer = position(pattern.inputs, name); outer >= 0) return {outer};
  std::vector<int> found;
  for (std::size_t maker = 0; maker < p; ++maker)
    for (auto [output, taken] : parts[maker].may_overwrite)
      if (pattern.parts[maker].outputs[static_cast<std::size_t>(output)] == name) {
        const std::vector<int> more = overwritten(pattern, parts, maker, taken);
        found.insert(found.end(), more.begin(), more.end());
      }
  return found;
}

/// Work of the matmuls among the parts; operands of the whole are moved once.
Cost fused_cost(const FusionPattern& pattern, const std::vector<OpSpec>& parts, const OpInstance& op) {
  auto operand = [&](int name) {
    if (name == FusionPattern::kAbsent) return Operand{};
    const int input = position(pattern.inputs, name);
    return input >= 0 ? op.inputs[static_cast<std::size_t>(input)]
                      : op.outputs[static_cast<std::size_t>(position(pattern.outputs, name))];
  };
  Cost whole = cost_of(OpSpec{}, op);
  for (std::size_t p = 0; p < parts.size(); ++p) {
    OpInstance part{.kind = parts[p].kind, .attributes = op.attributes, .geometry = op.geometry};
    for (int name : pattern.parts[p].inputs) part.inputs.push_back(operand(name));
    for (int name : pattern.parts[p].outputs) part.outputs.push_back(operand(name));
    const Cost cost = cost_of(parts[p], part);
    if (!cost.tensor_core) continue;
    whole.tensor_core = true;
    whole.format = cost.format;
    whole.flops += cost.flops;
    whole.repeated_flops += cost.repeated_flops;
  }
  return whole;
}

}  // namespace

FusionPattern parse_fusion(const Fusion& fusion, const OpSet& ops) { return PatternParser(fusion, ops).run(); }

OpSpec fused_spec(const FusionPattern& pattern, const OpSet& ops) {
  OpSpec spec;
  spec.kind = pattern.kind;
  for (int input : pattern.inputs) spec.inputs.push_back(pattern.names[static_cast<std::size_t>(input)]);
  for (int output : pattern.outputs) spec.outputs.push_back(pattern.names[static_cast<std::size_t>(output)]);
  spec.infer = [kind = pattern.kind](InferContext&) { fail_internal("op " + kind, "is made by fusion only"); };
  std::vector<OpSpec> parts;
  for (const FusionPattern::Part& part : pattern.parts) parts.push_back(ops.at(part.kind));
  spec.cost = [pattern, parts](const OpInstance& op) { return fused_cost(pattern, parts, op); };
  // A part that may be launched twice (see OpSpec::recompute) needs what it was made from until the end.
  for (const FusionPattern::Part& part : pattern.parts)
    if (ops.at(part.kind).recompute) return spec;
  for (std::size_t p = 0; p < pattern.parts.size(); ++p)
    for (auto [output, input] : parts[p].may_overwrite)
      for (int outer : overwritten(pattern, parts, p, input))
        spec.may_overwrite.emplace_back(
            position(pattern.outputs, pattern.parts[p].outputs[static_cast<std::size_t>(output)]), outer);
  return spec;
}

std::vector<FusionPattern> add_fusions(OpSet& ops, std::span<const Fusion> fusions) {
  std::vector<FusionPattern> patterns;
  for (const Fusion& fusion : fusions) {
    patterns.push_back(parse_fusion(fusion, ops));
    ops.add(fused_spec(patterns.back(), ops));
  }
  return patterns;
}

}  // namespace quern
