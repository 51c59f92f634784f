#include "plan/plan.h"

#include <algorithm>
#include <utility>

#include "base/format.h"
#include "program/names.h"
#include "quern/checked.h"
#include "quern/error.h"

namespace quern {

std::string_view name_of(TensorOwner owner) {
  switch (owner) {
    case TensorOwner::master: return "master weights";
    case TensorOwner::working: return "compute weights";
    case TensorOwner::gradient: return "gradients";
    case TensorOwner::optimizer: return "optimizer state";
    case TensorOwner::precision: return "precision state";
    case TensorOwner::statistic: return "statistics";
    case TensorOwner::input: return "inputs";
    case TensorOwner::observation: return "observations";
    case TensorOwner::result: return "results";
    case TensorOwner::loading: return "frozen weights while loading";
    case TensorOwner::activation: return kSavedActivations;
  }
  return "?";
}

const Placement& placement_of(TensorOwner owner, const StatePlacement& state) {
  static const Placement on_device;
  switch (owner) {
    case TensorOwner::master: return state.master;
    case TensorOwner::working: return state.weights;
    case TensorOwner::gradient: return state.gradients;
    case TensorOwner::optimizer: return state.moments;
    case TensorOwner::activation: return state.activations;
    default: return on_device;
  }
}

std::string Plan::whole_on_ranks() const {
  if (!options.state.shards()) return "";
  std::map<std::string, std::vector<std::string>> names;  // by op
  for (const ParameterPlan& parameter : parameters)
    if (parameter.spec.trainable && parameter.spec.extents.size() > 1 && !parameter.update.splits())
      names[format_list(parameter.update.whole_kinds)].push_back(parameter.spec.name);
  std::vector<std::string> texts;
  for (const auto& [kinds, of_kinds] : names)
    texts.push_back(format_list(of_kinds) + (kinds.empty() ? ", of which a state has no rows"
                                                           : ", of which op " + kinds + " needs whole matrices"));
  return format_list(texts);
}

PlanParts PlanParts::with(const PrecisionBackend& backend) const {
  return {model, backend, device, optimizer, custom_ops, outer_precision, stores, communicator_bytes};
}

const OffloadTraits* PlanParts::store(std::string_view id) const {
  auto it = std::find_if(stores.begin(), stores.end(), [&](const OffloadTraits& traits) { return traits.id == id; });
  return it == stores.end() ? nullptr : &*it;
}

int uploads_for(std::int64_t micro_batches) {
  constexpr std::int64_t kMost = 32;
  return static_cast<int>(std::min(micro_batches + 1, kMost));
}

std::int64_t Plan::stored_bytes(bool in_host_memory) const {
  std::int64_t bytes = 0;
  for (const StorePlan& store : stores)
    if (store.in_host_memory == in_host_memory) bytes = checked_sum(bytes, store.bytes);
  return bytes;
}

std::int64_t Plan::host_bytes() const {
  return checked_sum(checked_sum(pinned_bytes, snapshot_bytes), stored_bytes(true));
}

std::vector<PlannedTensor> training_state(const Plan& plan) {
  std::vector<PlannedTensor> state;
  for (const PlannedTensor& tensor : plan.tensors)
    if (tensor.is_training_state()) state.push_back(tensor);
  return state;
}

std::vector<StatePart> own_training_state(const Plan& plan) {
  const std::int64_t ranks = plan.options.state.ranks, rank = plan.options.state.rank;
  std::vector<StatePart> own;
  for (PlannedTensor& tensor : training_state(plan)) {
    StatePart part{.tensor = std::move(tensor)};
    part.extents = part.tensor.extents;
    if (part.tensor.whole.empty()) {
      const bool in_rows = !part.extents.empty() && part.tensor.owner != TensorOwner::precision;
      if (!in_rows && rank > 0) continue;
      const std::int64_t rows = in_rows ? part.extents[0] : 0;
      auto begin_of = [&](std::int64_t of) { return (rows * of + ranks - 1) / ranks; };  // rank 0 has one at least
      if (in_rows) part.extents[0] = begin_of(rank + 1) - begin_of(rank);
      if (in_rows && rows > 0) part.first = element_count(part.tensor.extents) / rows * begin_of(rank);
    }
    if (rank == 0 || element_count(part.extents) > 0) own.push_back(std::move(part));
  }
  return own;
}

PlannedTensor PlannedTensor::part_at(const Shard& shard) const {
  PlannedTensor part = *this;
  part.part_of = part_of < 0 ? offset : part_of;
  part.offset += byte_count({shard.first - first}, dtype);
  part.extents = shard.extents;
  return part;
}

void Plan::add(PlannedTensor tensor) {
  index_.try_emplace(tensor, tensors.size());
  tensors.push_back(std::move(tensor));
}

const PlannedTensor* Plan::find(const TensorId& id) const {
  auto it = index_.find(id);
  return it == index_.end() ? nullptr : &tensors[it->second];
}

const PlannedTensor& Plan::tensor(const TensorId& id) const {
  if (const PlannedTensor* found = find(id)) return *found;
  fail_internal("plan", "no tensor `" + text_of(id) + "`");
}

PlannedTensor Plan::part(TensorId id) const {
  if (const PlannedTensor* found = find(id)) return *found;
  const int part = std::exchange(id.part, TensorId::kWhole);
  const PlannedTensor& whole = tensor(id);
  if (whole.owner == TensorOwner::input) return part < 0 ? whole : whole.part_at({{1}, part});
  if (part >= 0) return whole.part_at(shard_of_rows(whole.extents, parameter(id.parameter).pieces, part));
  if (!whole.whole.empty() || id.parameter.empty() || element_count(whole.extents) == 1) return whole;
  const RowBounds& bounds = parameter(id.parameter).bounds;
  if (bounds.empty()) return whole;
  const Shard shard = shard_of_rows(whole.extents, bounds, options.state.rank);
  PlannedTensor own = whole.part_at(shard);
  own.part = part;
  own.whole = whole.extents;
  own.first = shard.first;
  return own;
}

const ParameterPlan& Plan::parameter(std::string_view name) const {
  for (const ParameterPlan& parameter : parameters)
    if (parameter.spec.name == name) return parameter;
  fail_internal("plan", "no parameter `" + std::string(name) + "`");
}

}  // namespace quern
