#include "plan/choice/trials.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/format.h"
#include "plan/time/estimate.h"

namespace quern {

namespace {

/// The largest number from `low` on that `fits`; `low` does, `high` does not. `at` is tried first, then numbers farther
/// and farther from it, up to one on the other side, and in between by halves.
template <class Fits>
std::int64_t border(std::int64_t low, std::int64_t high, std::int64_t at, Fits fits) {
  bool below = false, above = false;
  for (std::int64_t apart = 1; high - low > 1; apart *= 2) {
    at = std::clamp(at, low + 1, high - 1);
    if (fits(at)) {
      low = at;
      below = true;
    } else {
      high = at;
      above = true;
    }
    at = below && above ? (low + high) / 2 : below ? low + apart : high - apart;
  }
  return low;
}

std::int64_t transient_bytes(const Plan& plan) {
  std::int64_t bytes = 0;
  for (const OwnerBytes& owner : plan.owners) bytes += owner.owner == kTransient ? owner.bytes : 0;
  return bytes;
}

/// How many layers may have what all of `more` have and none of `fit`: each adds as much.
std::int64_t layers_that_fit(const Plan& fit, const Plan& more, const Limits& limits) {
  const std::int64_t layers = fit.model.layers, programs = transient_bytes(more) - transient_bytes(fit);
  auto of = [&](std::int64_t limit, std::int64_t bytes, std::int64_t all) {
    return limit == 0 || all <= bytes ? layers : (limit - bytes) / std::max<std::int64_t>((all - bytes) / layers, 1);
  };
  std::int64_t fitting = std::min(
      {of(limits.device - (limits.device > 0 ? programs : 0), fit.device_total(), more.device_total() - programs),
       of(limits.host, fit.host_bytes(), more.host_bytes()), of(limits.disk, fit.disk_bytes(), more.disk_bytes())});
  for (std::size_t i = 0; i < fit.stores.size(); ++i)
    fitting = std::min(fitting, of(fit.stores[i].capacity, fit.stores[i].bytes, more.stores[i].bytes));
  return fitting;
}

/// Activations in a store.
std::int64_t saved_in(const Plan& plan, std::size_t store) {
  for (const OwnerBytes& owner : plan.owners)
    if (owner.owner == kSavedActivations && owner.store == static_cast<std::int32_t>(store)) return owner.bytes;
  return 0;
}

}  // namespace

std::int64_t above(std::int64_t bytes, std::int64_t limit) {
  return limit > 0 ? std::max<std::int64_t>(bytes - limit, 0) : 0;
}

std::int64_t least_device_bytes(const Plan& plan) {
  std::int64_t bytes = plan.device_total();
  const bool in_slots = plan.options.state.activations.memory != kOnDevice;
  for (const OwnerBytes& owner : plan.owners)
    if (owner.store < 0 &&
        (owner.owner == kSavedActivations || owner.owner == kTransient || (in_slots && owner.owner == kSlots)))
      bytes -= owner.bytes;
  return bytes;
}

std::int64_t least_stored_bytes(const Plan& plan, bool host) {
  std::int64_t bytes = host ? plan.host_bytes() : plan.disk_bytes();
  for (std::size_t i = 0; i < plan.stores.size(); ++i)
    if (plan.stores[i].in_host_memory == host) bytes -= saved_in(plan, i);
  return bytes;
}

std::int64_t Limits::missing(const Plan& plan) const {
  std::int64_t bytes =
      above(plan.device_total(), device) + above(plan.host_bytes(), host) + above(plan.disk_bytes(), disk);
  for (const StorePlan& store : plan.stores) bytes += above(store.bytes, store.capacity);
  return bytes;
}

std::int64_t Limits::least_missing(const Plan& plan) const {
  std::int64_t bytes = above(least_device_bytes(plan), device) + above(least_stored_bytes(plan, true), host) +
                       above(least_stored_bytes(plan, false), disk);
  for (std::size_t i = 0; i < plan.stores.size(); ++i)
    bytes += above(plan.stores[i].bytes - saved_in(plan, i), plan.stores[i].capacity);
  return bytes;
}

Limits limits_of(const PlanParts& parts, const PlanOptions& options) {
  const DeviceTraits& device = parts.device.traits();
  const auto memory = static_cast<std::int64_t>(device.memory_bytes > 0 ? device.memory_bytes + device.own_bytes : 0);
  const std::int64_t budget = options.device_budget;
  return {budget <= 0   ? memory
          : memory == 0 ? budget
                        : std::min(budget, memory),
          options.host_budget, options.disk_budget};
}

bool chooses(const PlanOptions& options) {
  return options.device_budget > 0 || options.host_budget > 0 || options.disk_budget > 0;
}

std::string text_of(const RecomputeChoice& choice) {
  const std::string text = std::to_string(choice.recomputed.size()) + " values of a layer";
  if (choice.richer_layers == 0) return text;
  return text + ", " + std::to_string(choice.fewer.size()) + " in the first " + std::to_string(choice.richer_layers);
}

Decision recompute_decision(const PlanOptions& options, const RecomputeChoice& choice, std::int64_t named_bytes) {
  return {kRecomputeKey, "[" + format_list(options.recompute) + "]", text_of(choice),
          "without further recomputation " + format_bytes(named_bytes) + " of device memory are needed", ""};
}

Trials::Programs& Trials::programs(const PlanParts& parts, const PlanOptions& options) {
  const std::tuple key{&parts.precision, options.geometry.batch, options.loss_chunk};
  const auto it = known_.find(key);
  return it != known_.end() ? it->second : known_.try_emplace(key, parts, options).first->second;
}

Plan Trials::plan(const PlanParts& parts, const PlanOptions& options, const RecomputeChoice& choice,
                  const PlanTest& worth_slots) {
  constexpr std::size_t kMost = 8;  // some megabytes each
  Programs& programs = this->programs(parts, options);
  LayerClasses classes = programs.lowered.layer_classes(choice);
  const std::tuple key{choice.recomputed, choice.fewer, std::move(classes.stages)};
  auto chosen = programs.chosen.find(key);
  if (chosen == programs.chosen.end()) {
    for (auto& [of, known] : known_)
      if (&known != &programs || known.chosen.size() >= kMost) known.chosen.clear();
    chosen = programs.chosen.try_emplace(key, programs.parts, options, programs.lowered, choice).first;
  }
  // How many layers recompute less does not change programs.
  chosen->second.plan.class_of_layer = std::move(classes.of_layer);
  return plan_with(parts, options, chosen->second, worth_slots);
}

Choice Trials::named(const PlanParts& parts, const PlanOptions& options, const PlanTest& worth_slots) {
  RecomputeChoice named{.recomputed = programs(parts, options).lowered.recomputed(options.recompute)};
  Plan plan = this->plan(parts, options, named, worth_slots);
  return {std::move(named), std::move(plan), false, &parts.precision};
}

// Programs that keep less also need more transient memory, so what fits is found by laying plans out. All layers get
// the step of the path that fits them all, and as many as there is room for the next one.
Choice Trials::within(const PlanParts& parts, const PlanOptions& options, const Limits& limits) {
  Programs& programs = this->programs(parts, options);
  std::vector<std::set<std::string>>& path = programs.path;
  const ProgramSet& lowered = programs.lowered;
  if (path.empty()) {
    auto bytes = [&](const Value& value) {
      return static_cast<double>(byte_count(extents_at(value.shape, options.geometry), value.dtype));
    };
    auto seconds = [&](const Program& program) {
      return program_seconds(lowered.fused(program), lowered.ops(), options.geometry, parts.device);
    };
    path = recompute_path(lowered.typical().lowered.joint, lowered.ops(), bytes, seconds);
    programs.step = path.size() - 1;
  }
  std::optional<Choice> fit, above;  // the last that fits, and that does not
  auto fits = [&](RecomputeChoice choice) {
    Plan plan = this->plan(parts, options, choice, [&](const Plan& plan) { return limits.hold(plan); });
    const bool held = limits.hold(plan);
    (held ? fit : above) = Choice{std::move(choice), std::move(plan), held, &parts.precision};
    return held;
  };
  const auto steps = static_cast<std::int64_t>(path.size());
  const std::int64_t step = border(-1, steps, static_cast<std::int64_t>(programs.step), [&](std::int64_t at) {
    return fits({.recomputed = path[static_cast<std::size_t>(at)]});
  });
  const auto fitting = programs.step = static_cast<std::size_t>(std::max<std::int64_t>(step, 0));
  if (!fit) return std::move(*above);
  if (step + 1 == steps) return std::move(*fit);
  const std::int64_t layers = layers_that_fit(fit->plan, above->plan, limits);
  border(0, fit->plan.model.layers, layers, [&](std::int64_t richer) {
    return fits({.recomputed = path[fitting], .fewer = path[fitting + 1], .richer_layers = richer});
  });
  return std::move(*fit);
}

}  // namespace quern
