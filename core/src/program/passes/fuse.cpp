#include "program/passes/fuse.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "program/passes/op_forms.h"
#include "program/passes/rewrite.h"

namespace quern {

namespace {

// One occurrence of a pattern: the op for each part, and the value for each name.
struct Match {
  std::vector<int> ops;
  std::vector<ValueId> values;
};

class Matcher {
 public:
  Matcher(const Program& program, const OpSet& ops, const FusionPattern& pattern)
      : program_(program), ops_(ops), pattern_(pattern) {}

  // An occurrence whose last part is op `last`.
  std::optional<Match> at(int last) {
    Match match{std::vector<int>(pattern_.parts.size(), -1), std::vector<ValueId>(pattern_.names.size(), kNoValue)};
    if (!place(match, pattern_.parts.size() - 1, last)) return std::nullopt;
    // Earlier parts are found through the values they make; a part that shares only inputs (a recomputation beside the
    // gradient that reads the same value) is looked for among the readers of those.
    for (std::size_t part = pattern_.parts.size() - 1; part-- > 0;)
      if (!find_part(match, part, last)) return std::nullopt;
    return match;
  }

 private:
  bool bind(Match& match, int name, ValueId value) const {
    ValueId& bound = match.values[static_cast<std::size_t>(name)];
    if (bound == kNoValue) bound = value;
    return bound == value && value != kNoValue;
  }

  bool place(Match& match, std::size_t part, int index) const {
    const FusionPattern::Part& wanted = pattern_.parts[part];
    const Op& op = program_.ops[static_cast<std::size_t>(index)];
    if (op.kind != wanted.kind || std::find(match.ops.begin(), match.ops.end(), index) != match.ops.end()) return false;
    std::vector<ValueId> inputs = op.inputs;
    while (!inputs.empty() && inputs.back() == kNoValue) inputs.pop_back();
    if (inputs.size() != wanted.inputs.size()) return false;
    Match trial = match;
    if (!bind_all(trial, wanted, inputs, op.outputs)) {
      if (!ops_.at(op.kind).commutative) return false;
      trial = match;
      std::swap(inputs[0], inputs[1]);
      if (!bind_all(trial, wanted, inputs, op.outputs)) return false;
    }
    trial.ops[part] = index;
    match = std::move(trial);
    return true;
  }

  // A result of the pattern may only be bound to a value that another of its parts makes, and a free name to one that
  // none makes.
  bool bind_all(Match& match, const FusionPattern::Part& wanted, const std::vector<ValueId>& inputs,
                const std::vector<ValueId>& outputs) const {
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if ((wanted.inputs[i] == FusionPattern::kAbsent) != (inputs[i] == kNoValue)) return false;
      if (inputs[i] == kNoValue) continue;
      if (!bind(match, wanted.inputs[i], inputs[i])) return false;
      if (!made_as_expected(wanted.inputs[i], inputs[i])) return false;
    }
    for (std::size_t i = 0; i < wanted.outputs.size(); ++i)
      if (!bind(match, wanted.outputs[i], outputs[i])) return false;
    return true;
  }

  bool made_as_expected(int name, ValueId value) const {
    for (const FusionPattern::Part& part : pattern_.parts) {
      if (std::find(part.outputs.begin(), part.outputs.end(), name) == part.outputs.end()) continue;
      int producer = program_.producer(value);
      return producer >= 0 && program_.ops[static_cast<std::size_t>(producer)].kind == part.kind;
    }
    return true;
  }

  bool find_part(Match& match, std::size_t part, int last) const {
    for (int output : pattern_.parts[part].outputs) {
      ValueId value = match.values[static_cast<std::size_t>(output)];
      if (value != kNoValue) {
        int producer = program_.producer(value);
        return producer >= 0 && place(match, part, producer);
      }
    }
    for (int index = last; index-- > 0;)
      if (place(match, part, index)) return true;
    for (int index = last + 1; index < static_cast<int>(program_.ops.size()); ++index)
      if (place(match, part, index)) return true;
    return false;
  }

  const Program& program_;
  const OpSet& ops_;
  const FusionPattern& pattern_;
};

std::optional<Op> fused_op(const Program& program, const FusionPattern& pattern, const Match& match) {
  Op fused{.kind = pattern.kind, .inputs = {}, .outputs = {}, .attributes = {}, .phase = Phase::forward};
  for (int index : match.ops) {
    const Op& part = program.ops[static_cast<std::size_t>(index)];
    fused.phase = std::max(fused.phase, part.phase);
    for (const auto& [name, value] : part.attributes.all()) {
      if (auto it = fused.attributes.all().find(name); it != fused.attributes.all().end() && it->second != value)
        return std::nullopt;
      fused.attributes.set(name, value);
    }
  }
  for (int input : pattern.inputs) fused.inputs.push_back(match.values[static_cast<std::size_t>(input)]);
  for (int output : pattern.outputs) fused.outputs.push_back(match.values[static_cast<std::size_t>(output)]);
  return fused;
}

// The program with the parts replaced; nothing when no order of its ops is left.
std::optional<Program> replaced(const Program& program, const Match& match, const Op& fused) {
  Program trial = program;
  int place = *std::max_element(match.ops.begin(), match.ops.end());
  trial.ops[static_cast<std::size_t>(place)] = fused;
  std::vector<int> gone = match.ops;
  std::sort(gone.rbegin(), gone.rend());
  for (int index : gone)
    if (index != place) trial.ops.erase(trial.ops.begin() + index);
  if (!order_ops(trial)) return std::nullopt;
  return trial;
}

}  // namespace

Program fuse(const Program& program, const OpSet& ops, std::span<const FusionPattern> patterns,
             const Geometry& geometry, const std::function<bool(const OpInstance&)>& accepts) {
  Program fused = program;
  for (const FusionPattern& pattern : patterns) {
    for (int last = 0; last < static_cast<int>(fused.ops.size()); ++last) {
      std::optional<Match> match = Matcher(fused, ops, pattern).at(last);
      if (!match) continue;
      std::optional<Op> op = fused_op(fused, pattern, *match);
      std::optional<Program> trial = op ? replaced(fused, *match, *op) : std::nullopt;
      if (!trial) continue;
      const std::vector<OpInstance> forms = OpForms(*trial, ops, geometry).of(*op);
      if (!std::all_of(forms.begin(), forms.end(), accepts)) continue;
      fused = std::move(*trial);
      last = -1;  // indices moved
    }
  }
  check_program(fused);
  return fused;
}

}  // namespace quern
