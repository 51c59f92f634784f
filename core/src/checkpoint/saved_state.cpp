#include "checkpoint/saved_state.h"

#include <algorithm>
#include <array>
#include <map>

#include "base/shorten.h"
#include "checkpoint/changes.h"
#include "program/names.h"
#include "quern/error.h"

namespace quern {

namespace {

enum Part { parameters, model_states, optimizer, precision, kParts };
constexpr const char* kDiffer[kParts] = {"its parameters differ", "its model's states differ",
                                         "its optimizer state differs", "its precision state differs"};

Part part_of(const PlannedTensor& tensor, const Plan& plan) {
  if (tensor.owner == TensorOwner::optimizer) return optimizer;
  if (tensor.owner != TensorOwner::precision) return parameters;
  return plan.model_states.contains(tensor.kind) ? model_states : precision;
}

// The optimizer has states of parameters, "moment1/qkv.weight/3"; the precision backend's belong to none.
Part part_of(const std::string& name, const TensorFiles& stored) {
  if (name.starts_with(kMasterPrefix)) return parameters;
  const std::size_t slash = name.find('/');
  const bool of_parameter =
      slash != std::string::npos && stored.find(std::string(kMasterPrefix) + name.substr(slash + 1));
  return of_parameter ? optimizer : precision;
}

std::string form(StoredType type, const Extents& extents) {
  return std::string(name_of(type)) + " " + printable(to_string(extents), 60);
}

/// What differs, a text for each tensor.
using Differences = std::vector<std::string>;

bool fits(const StoredTensor* stored, const PlannedTensor& planned) {
  return stored && stored->type == stored_type_of(planned.dtype) && stored->extents == planned.whole_extents();
}

std::array<Differences, kParts> compare(const Plan& plan, const TensorFiles& stored) {
  std::array<Differences, kParts> differences;
  std::map<std::string, const PlannedTensor*, std::less<>> known;
  const std::vector<PlannedTensor> state = training_state(plan);
  for (const PlannedTensor& tensor : state) {
    const std::string name = state_name(tensor);
    known[name] = &tensor;
    const StoredTensor* found = stored.find(name);
    if (!fits(found, tensor))
      differences[part_of(tensor, plan)].push_back(
          quote_name(name) + " found " + (found ? form(found->type, found->extents) : "none") + ", expected " +
          form(stored_type_of(tensor.dtype), tensor.whole_extents()));
  }
  for (const StoredTensor& tensor : stored.tensors())
    if (!known.contains(tensor.name))
      differences[part_of(tensor.name, stored)].push_back(quote_name(tensor.name) + " found " +
                                                          form(tensor.type, tensor.extents) + ", expected none");
  if (!plan.options.train) differences[optimizer].clear(), differences[precision].clear();
  return differences;
}

std::string list(const Differences& items) {
  constexpr std::size_t kMost = 5;
  std::string text;
  for (std::size_t i = 0; i < std::min(items.size(), kMost); ++i)
    text.append(i == 0 ? "" : "; ").append(printable(items[i], 160));
  if (items.size() > kMost) text += "; and " + std::to_string(items.size() - kMost) + " more";
  return text;
}

[[noreturn]] void refuse(const Checkpoint& checkpoint, Part part, const Differences& differences,
                         std::vector<std::string> changes, bool train) {
  std::erase_if(changes, [](const std::string& change) {
    return !change.starts_with("model.") && !change.starts_with("optimizer.") && !change.starts_with("precision.");
  });
  throw Error(ErrorCode::input,
              {.where = checkpoint.path,
               .what = std::string("does not fit this run, ") + kDiffer[part] + ": " + list(differences) +
                       (changes.empty() ? "" : "; changed since the checkpoint: " + list(changes)),
               .found = {},
               .expected = {},
               .next = train ? "resume with the model, precision and optimizer settings of the checkpoint, or choose "
                               "another log.directory"
                             : "give the config of the checkpoint's run"});
}

// This rank's part, piece by piece, from `stored`, or zeros where it is null.
void fill(Engine& engine, const PlannedTensor& tensor, const TensorFiles& file, const StoredTensor* stored) {
  constexpr std::int64_t kPiece = std::int64_t{1} << 22;  // elements
  const std::int64_t end = tensor.first + element_count(tensor.extents);
  std::vector<std::byte> buffer;
  for (std::int64_t at = tensor.first; at < end; at += kPiece) {
    const std::int64_t count = std::min(kPiece, end - at);
    buffer.assign(static_cast<std::size_t>(count) * size_of(tensor.dtype), std::byte{});
    if (stored) file.read(*stored, static_cast<std::uint64_t>(at) * size_of(tensor.dtype), buffer);
    engine.write(tensor, at, count, buffer.data());
  }
}

bool precision_changed(const std::vector<std::string>& changes) {
  return std::any_of(changes.begin(), changes.end(), [](const std::string& change) {
    return change.starts_with("precision.") || change == kUnreadableConfig;
  });
}

}  // namespace

std::string state_name(const PlannedTensor& tensor) {
  std::string name = tensor.kind;
  if (!tensor.parameter.empty()) name += "/" + tensor.parameter;
  if (tensor.layer >= 0) name += "/" + std::to_string(tensor.layer);
  return name;
}

std::vector<std::string> evaluated_states(const Plan& plan) {
  std::vector<std::string> kinds;
  for (const ParameterPlan& parameter : plan.parameters)
    for (const OptimizerState& state : parameter.update.states)
      if (state.evaluated && std::find(kinds.begin(), kinds.end(), state.name) == kinds.end())
        kinds.push_back(state.name);
  return kinds;
}

std::vector<std::string> load_state(Engine& engine, const Checkpoint& checkpoint,
                                    const std::vector<std::string>& changes, const std::function<void()>& written) {
  const auto differences = compare(engine.plan(), checkpoint.tensors);
  for (Part part : {parameters, model_states, optimizer, precision})
    if (!differences[part].empty() && (part != precision || !precision_changed(changes)))
      refuse(checkpoint, part, differences[part], changes, engine.plan().options.train);
  engine.apply_update();
  for (const PlannedTensor& tensor : training_state(engine.plan())) {
    const std::string name = state_name(tensor);
    const bool evaluates = !engine.plan().options.train && tensor.kind == names::kMaster;
    const StoredTensor* stored = checkpoint.tensors.find(evaluates ? evaluated_name(checkpoint, name) : name);
    fill(engine, tensor, checkpoint.tensors, fits(stored, tensor) ? stored : nullptr);
  }
  written();
  engine.refresh();
  if (differences[precision].empty()) return {};
  return {"[precision] changed since the checkpoint; states that are not in it are reset: " +
          list(differences[precision])};
}

}  // namespace quern
