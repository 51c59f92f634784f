#include "plan/choice/refusal.h"

#include <algorithm>
#include <optional>

#include "base/format.h"
#include "plan/choice/choose.h"
#include "quern/checked.h"
#include "quern/error.h"

namespace quern {

namespace {

constexpr std::size_t kMostNamed = 3;  // owners, and changes

/// As a config spells it, rounded up.
std::string in_mib(std::int64_t bytes) { return "\"" + std::to_string(rounded_up(bytes, 1 << 20) >> 20) + "MiB\""; }

enum class Where { device, host, disk };

std::int64_t bytes_of(const Plan& plan, Where where) {
  return where == Where::device ? plan.device_total() : where == Where::host ? plan.host_bytes() : plan.disk_bytes();
}
const char* suffix_of(Where where) {
  return where == Where::device ? "" : where == Where::host ? " of host memory" : " on disk";
}

/// "404 KiB needed, of which 154 KiB optimizer state, ...": the largest owners there.
std::string needed(const Plan& plan, Where where) {
  std::vector<OwnerBytes> owners;
  for (const OwnerBytes& owner : plan.owners) {
    const bool stored = owner.store >= 0;
    const bool on_device = !stored && owner.memory == MemoryKind::device;
    const bool on_host = stored ? plan.stores[static_cast<std::size_t>(owner.store)].in_host_memory : !on_device;
    if (where == (on_device ? Where::device : on_host ? Where::host : Where::disk)) owners.push_back(owner);
  }
  std::stable_sort(owners.begin(), owners.end(), [](const auto& a, const auto& b) { return a.bytes > b.bytes; });
  std::vector<std::string> largest;
  for (std::size_t i = 0; i < std::min(owners.size(), kMostNamed); ++i)
    largest.push_back(format_bytes(owners[i].bytes) + " " + owners[i].owner);
  return format_bytes(bytes_of(plan, where)) + suffix_of(where) + " needed, of which " + format_list(largest);
}

/// A change of the config with which the run fits, and the seconds of a step then.
struct Change {
  std::string text;
  double seconds = 0;
};

/// Tries changes by one key each.
class Changes {
 public:
  Changes(const PlanParts& parts, const PlanOptions& options, const Plan& nearest)
      : parts_(parts), options_(options), nearest_(nearest) {}

  std::vector<std::string> cheapest() {
    smaller_micro_batch();
    for (const auto& [key, placement] : kPlacedKeys) {
      if ((options_.state.*placement).memory != kOnDevice || options_.stores.empty()) continue;
      PlanOptions changed = options_;
      const std::string& store = options_.stores.front();
      (changed.state.*placement).memory = store;
      if (placement_faults(changed.state).empty()) add(std::string(key) + " = \"" + store + "\"", changed);
    }
    let_choose();
    fewer_logits();
    lower_precision("optimizer.gradient", &PlanOptions::gradient);
    lower_precision("optimizer.master", &PlanOptions::master);
    if (options_.snapshot) {
      PlanOptions changed = options_;
      changed.snapshot = false;
      add("checkpoint.background = false", changed);
    }
    std::stable_sort(found_.begin(), found_.end(),
                     [](const Change& a, const Change& b) { return a.seconds < b.seconds; });
    higher_budgets();
    std::vector<std::string> texts;
    for (std::size_t i = 0; i < std::min(found_.size(), kMostNamed); ++i)
      texts.push_back(found_[i].text +
                      (found_[i].seconds > 0 ? " (" + format_duration(found_[i].seconds) + " a step)" : ""));
    return texts;
  }

 private:
  /// None: it does not fit either, or a kernel lacks the form that it needs.
  std::optional<Choice> tried(const PlanOptions& changed) const {
    const std::int64_t limit = limits_of(parts_, changed).device;
    if (limit > 0 && least_kept(changed) > limit) return std::nullopt;
    try {
      return choose_fitting(parts_, changed);
    } catch (const Error& error) {
      if (error.code() == ErrorCode::internal) throw;
      return std::nullopt;
    }
  }

  /// Device memory of the state that a change leaves there as it is. To plan a model of any size takes long, and no
  /// plan with the change takes less.
  std::int64_t least_kept(const PlanOptions& changed) const {
    std::int64_t bytes = 0;
    for (const TensorOwner kind : {TensorOwner::master, TensorOwner::gradient, TensorOwner::optimizer}) {
      const std::string& memory = placement_of(kind, changed.state).memory;
      const bool moves = memory == kAuto ? chooses(changed) : memory != kOnDevice;
      const bool shrinks = (kind == TensorOwner::master && changed.master != options_.master) ||
                           (kind == TensorOwner::gradient && changed.gradient != options_.gradient);
      if (moves || shrinks) continue;
      for (const OwnerBytes& owner : nearest_.owners)
        if (owner.store < 0 && owner.memory == MemoryKind::device && owner.owner == name_of(kind)) bytes += owner.bytes;
    }
    return bytes;
  }

  bool add(const std::string& text, const PlanOptions& changed) {
    const std::optional<Choice> choice = tried(changed);
    if (choice) found_.push_back({text, choice->plan.seconds_per_step});
    return choice.has_value();
  }

  // The largest that fits, for the same step.
  void smaller_micro_batch() {
    PlanOptions changed = options_;
    for (int factor = 2; changed.geometry.batch % 2 == 0; factor *= 2) {
      changed.geometry.batch /= 2;
      changed.accumulation *= 2;
      changed.uploads = uploads_for(changed.accumulation);
      if (add("train.micro_batch = " + std::to_string(changed.geometry.batch) + " with " + std::to_string(factor) +
                  " times the accumulation",
              changed))
        return;
    }
  }

  void fewer_logits() {
    PlanOptions changed = options_;
    changed.loss_chunk = kSmallChunk;
    if (options_.loss_chunk == 0 && options_.geometry.tokens() > kSmallChunk)
      add("train.loss_chunk = " + std::to_string(kSmallChunk), changed);
  }

  void lower_precision(const char* key, DType PlanOptions::*dtype) {
    if (options_.*dtype != DType::f32) return;
    PlanOptions changed = options_;
    changed.*dtype = DType::bf16;
    add(std::string(key) + " = \"bf16\"", changed);
  }

  void let_choose() {
    if (chooses(options_)) return;
    PlanOptions changed = options_;
    changed.device_budget = limits_of(parts_, options_).device;
    add("memory.device_budget = " + in_mib(changed.device_budget) + ", with which the planner chooses", changed);
  }

  // Last, since this machine may have no more.
  void higher_budgets() {
    auto raise = [&](const char* key, std::int64_t PlanOptions::*budget, Where where) {
      if (options_.*budget <= 0) return;
      PlanOptions changed = options_;
      changed.*budget = std::int64_t{1} << 60;
      const std::optional<Choice> choice = tried(changed);
      if (!choice) return;
      found_.push_back(
          {std::string(key) + " = " + in_mib(bytes_of(choice->plan, where)), choice->plan.seconds_per_step});
    };
    raise("memory.disk_budget", &PlanOptions::disk_budget, Where::disk);
    raise("memory.host_budget", &PlanOptions::host_budget, Where::host);
    raise("memory.device_budget", &PlanOptions::device_budget, Where::device);
  }

  const PlanParts& parts_;
  const PlanOptions& options_;
  const Plan& nearest_;
  std::vector<Change> found_;
};

}  // namespace

void refuse(const PlanParts& parts, const PlanOptions& options, const Plan& nearest) {
  const Limits limits = limits_of(parts, options);
  const bool budgeted = options.device_budget > 0 && limits.device == options.device_budget;
  std::string key;  // of the first that is exceeded
  std::vector<std::string> found, most;
  auto compare = [&](Where where, std::int64_t limit, const std::string& of) {
    const std::int64_t bytes = bytes_of(nearest, where);
    if (limit == 0 || bytes <= limit) return;
    if (key.empty()) key = of;
    found.push_back(needed(nearest, where));
    most.push_back(format_bytes(limit) + suffix_of(where) + ", which is " + format_bytes(bytes - limit) + " less");
  };
  compare(Where::device, limits.device, budgeted ? "memory.device_budget" : "device " + parts.device.traits().id);
  compare(Where::host, limits.host, "memory.host_budget");
  compare(Where::disk, limits.disk, "memory.disk_budget");
  for (const StorePlan& store : nearest.stores) {
    if (above(store.bytes, store.capacity) == 0) continue;
    if (key.empty()) key = "store " + store.id;
    found.push_back(format_bytes(store.bytes) + " in store " + store.id + " needed");
    most.push_back(format_bytes(store.capacity) + " in it, which is " + format_bytes(store.bytes - store.capacity) +
                   " less");
  }
  const std::vector<std::string> changes = Changes(parts, options, nearest).cheapest();
  std::string next = "the cheapest changes with which it fits: " + format_list(changes);
  if (changes.empty()) next = "lower train.micro_batch, shorten train.sequence, or take a smaller model";
  throw Error(ErrorCode::resources, {.where = key,
                                     .what = "the run does not fit",
                                     .found = format_list(found),
                                     .expected = "at most " + format_list(most),
                                     .next = next});
}

}  // namespace quern
