#include "plan/report.h"

#include <algorithm>
#include <array>
#include <utility>

#include <fmt/format.h>

#include "base/format.h"
#include "plan/time/step_time.h"
#include "program/names.h"

namespace quern {

std::string memory_table(const Plan& plan) {
  std::string text = "device memory\n";
  for (const OwnerBytes& owner : plan.owners)
    if (owner.bytes > 0 && owner.memory == MemoryKind::device && owner.store < 0)
      text += fmt::format("  {:<20}{:>12}  {:5.1f}%\n", owner.owner, format_bytes(owner.bytes),
                          100.0 * static_cast<double>(owner.bytes) / static_cast<double>(plan.device_total()));
  text += fmt::format("  {:<20}{:>12}\n", "total", format_bytes(plan.device_total()));
  text += "pinned host memory\n";
  for (const OwnerBytes& owner : plan.owners)
    if (owner.bytes > 0 && owner.memory == MemoryKind::pinned)
      text += fmt::format("  {:<20}{:>12}\n", owner.owner, format_bytes(owner.bytes));
  for (std::size_t store = 0; store < plan.stores.size(); ++store) {
    text += fmt::format("store {}\n", plan.stores[store].id);
    for (const OwnerBytes& owner : plan.owners)
      if (owner.store == static_cast<std::int32_t>(store))
        text += fmt::format("  {:<20}{:>12}\n", owner.owner, format_bytes(owner.bytes));
    text += fmt::format("  {:<20}{:>12}\n", "total", format_bytes(plan.stores[store].bytes));
  }
  if (!plan.stores.empty())
    text += fmt::format("{:<22}{:>12}\n", "host memory in all", format_bytes(plan.host_bytes()));
  return text;
}

namespace {

using GroupBytes = std::array<std::int64_t, 3>;  // by ParameterGroup

constexpr int kPlacedWidth = 30;

/// A rank's tensors of parameters. A compute weight that is the master itself takes nothing.
std::vector<const PlannedTensor*> tensors_of(const Plan& plan, TensorOwner owner) {
  auto is_master = [&](const PlannedTensor& tensor) {
    return std::ranges::any_of(std::array{names::kMaster, names::kMasterScale}, [&](const char* kind) {
      const PlannedTensor* master = plan.find({kind, tensor.parameter, tensor.layer});
      return tensor.kind != kind && master && master->place() == tensor.place();
    });
  };
  std::vector<const PlannedTensor*> tensors;
  for (const PlannedTensor& tensor : plan.tensors)
    if (tensor.owner == owner && !tensor.parameter.empty() && !tensor.over_ranks &&
        (owner != TensorOwner::working || !is_master(tensor)))
      tensors.push_back(&tensor);
  return tensors;
}

/// By parameter group.
GroupBytes group_bytes(const Plan& plan, const std::vector<const PlannedTensor*>& tensors) {
  GroupBytes bytes{};
  for (const PlannedTensor* tensor : tensors)
    bytes[static_cast<std::size_t>(plan.parameter(tensor->parameter).spec.group)] += tensor->bytes();
  return bytes;
}

std::string placed_in(const Placement& placement) {
  if (placement.device_percent == 0) return placement.memory;
  return fmt::format("{}, {}% on the device", placement.memory, placement.device_percent);
}

/// Some tensors stay on the device whatever their kind's key says: vectors, and masters that ops read directly.
std::string placed_in(const Placement& placement, const std::vector<const PlannedTensor*>& tensors) {
  std::int64_t stored = 0, on_device = 0;
  for (const PlannedTensor* tensor : tensors) (tensor->store < 0 ? on_device : stored) += tensor->bytes();
  if (stored == 0 && on_device > 0) return std::string(kOnDevice);
  if (on_device == 0 || placement.memory == kOnDevice || placement.device_percent > 0) return placed_in(placement);
  return fmt::format("{}, {} on the device", placement.memory, format_bytes(on_device));
}

std::string sharded_over(Sharding sharding, const std::vector<const PlannedTensor*>& tensors) {
  std::int64_t shards = 0, whole = 0;
  for (const PlannedTensor* tensor : tensors) (tensor->whole.empty() ? whole : shards) += tensor->bytes();
  if (sharding == Sharding::none || whole == 0) return std::string(name_of(sharding));
  if (shards == 0) return std::string(name_of(Sharding::none));
  return fmt::format("{}, {} whole", name_of(sharding), format_bytes(whole));
}

/// Bytes of persistent state by kind and parameter group, with its place and what it is split over.
std::string state_table(const Plan& plan) {
  std::string text = fmt::format("{:<20}{:>12}{:>12}{:>12}  {:<{}}{}\n", "state of a rank", "embedding", "blocks",
                                 "head", "placed in", kPlacedWidth, "sharded over");
  const StatePlacement& state = plan.options.state;
  auto row = [&](std::string_view name, const GroupBytes& bytes, const std::string& placed,
                 const std::string& sharded) {
    text += fmt::format("  {:<18}", name);
    for (std::int64_t count : bytes) text += fmt::format("{:>12}", count > 0 ? format_bytes(count) : "-");
    text += fmt::format("  {:<{}}{}\n", placed, kPlacedWidth, sharded);
  };
  GroupBytes all{}, parameters{};
  for (const auto& [owner, placement] :
       {std::pair(TensorOwner::master, &state.master), std::pair(TensorOwner::working, &state.weights),
        std::pair(TensorOwner::gradient, &state.gradients), std::pair(TensorOwner::optimizer, &state.moments)}) {
    const std::vector<const PlannedTensor*> tensors = tensors_of(plan, owner);
    const GroupBytes bytes = group_bytes(plan, tensors);
    for (std::size_t group = 0; group < all.size(); ++group) all[group] += bytes[group];
    row(name_of(owner), bytes, placed_in(*placement, tensors), sharded_over(placement->sharding, tensors));
  }
  for (const ParameterPlan& parameter : plan.parameters)
    for_each_layer(parameter.spec, static_cast<int>(plan.model.layers),
                   [&](int) { parameters[static_cast<std::size_t>(parameter.spec.group)] += parameter.spec.count(); });
  text += fmt::format("  {:<18}", "bytes a parameter");
  for (std::size_t group = 0; group < all.size(); ++group)
    text += parameters[group] > 0
                ? fmt::format("{:>12.2f}", static_cast<double>(all[group]) / static_cast<double>(parameters[group]))
                : fmt::format("{:>12}", "-");
  text += "\n";
  GroupBytes saved{};
  for (const OwnerBytes& owner : plan.owners)
    if (owner.owner == kSavedActivations) saved[static_cast<std::size_t>(ParameterGroup::block)] += owner.bytes;
  row(kSavedActivations, saved, placed_in(state.activations), std::string(name_of(state.activations.sharding)));
  return text;
}

/// The planner's choices and reasons, a line for each "auto" key; empty without one.
std::string choice_table(const Plan& plan) {
  std::string text;
  for (const Decision& decision : plan.decisions)
    text += fmt::format("  {} = {}  (config: {}): {}\n", decision.key, decision.value, decision.configured,
                        decision.reason);
  return text.empty() ? text : "chosen\n" + text;
}

}  // namespace

std::string plan_report(const Plan& plan, const DeviceTraits& device, std::int64_t accumulation) {
  const Geometry& geometry = plan.options.geometry;
  std::string text = fmt::format(
      "model           {} parameters, {} layers{}\n", format_count(static_cast<double>(plan.parameter_count)),
      plan.model.layers, plan.model.vocabulary > 0 ? fmt::format(", vocabulary {}", plan.model.vocabulary) : "");
  text += fmt::format("device          {} ({})\n", device.id, device.name);
  text += fmt::format("micro-batch     {} x {} tokens, {} a step\n", geometry.batch, geometry.sequence, accumulation);
  text += fmt::format("ranks           {}\n\n", plan.options.state.ranks);
  text += memory_table(plan);
  text += "\n" + state_table(plan);
  if (const std::string whole = plan.whole_on_ranks(); !whole.empty()) text += "  whole on every rank: " + whole + "\n";
  if (!plan.decisions.empty()) text += "\n" + choice_table(plan);
  text += "\nkept of a layer for the backward pass\n";
  for (const LayerClass& layer : plan.classes) {
    std::int64_t bytes = 0;
    std::set<std::string> names;
    for (const Value& value : layer.saved) names.insert(value.name), bytes += plan.bytes_of(value);
    text += fmt::format("  {:<12}{:>12}  {}\n", layer.name, format_bytes(bytes), fmt::join(names, ", "));
  }
  double tokens = static_cast<double>(geometry.tokens());
  text += fmt::format("\nwork            {}FLOP a token\n", format_count(plan.flops_per_token));
  if (plan.seconds_per_micro_step > 0)
    text += fmt::format("estimate        {} a micro-batch, {} tok/s\n", format_duration(plan.seconds_per_micro_step),
                        format_count(tokens / plan.seconds_per_micro_step));
  if (plan.seconds_per_step > 0) {
    text += fmt::format("                {} a step, {} tok/s with the update\n", format_duration(plan.seconds_per_step),
                        format_count(plan.tokens_per_second()));
    const StepTime step = simulated_step(plan, device, accumulation);
    const std::string waits = waits_text(step);
    if (!waits.empty()) text += "                kernels wait " + waits + "\n";
    for (const std::string& slow : slow_texts(step)) text += "slow            " + slow + "\n";
  }
  return text;
}

}  // namespace quern
