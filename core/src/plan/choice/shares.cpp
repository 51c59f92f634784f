#include "plan/choice/shares.h"

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "base/format.h"
#include "plan/lay_out.h"
#include "plan/schedule/make_schedules.h"

namespace quern {

namespace {

/// Tries other placements for choices that differ by placements alone, each once; and other chunks of logits.
class Search {
 public:
  Search(Trials& trials, const PlanParts& parts, const PlanOptions& options)
      : trials_(trials), parts_(parts), options_(options), limits_(limits_of(parts, options)) {}

  void run_chunks(Choice& best) {
    for (const std::int64_t chunk : {std::int64_t{4096}, std::int64_t{2048}, std::int64_t{1024}, std::int64_t{512}}) {
      PlanOptions trial = best.plan.options;
      trial.loss_chunk = chunk;
      if (chunk < trial.geometry.tokens()) try_options(best, trial);
    }
  }

  /// Percents that are far apart, then those beside the fastest of them. State that is used once a step may be in any
  /// store, also in one where kernels read and write it in place.
  void run(Choice& best, const PlacedKey& key) {
    const Placement& fastest = best.plan.options.state.*key.placement;
    const std::string whole = text_of(fastest);
    const double seconds = best.plan.seconds_per_step;
    for (const std::string& store : options_.stores) {
      for (const std::int64_t percent : {0, 20, 40, 60, 80})
        if (try_percent(best, key, store, percent).fills_device) break;
      if (key.placement != &StatePlacement::master && key.placement != &StatePlacement::moments) break;
    }
    for (const std::int64_t apart : {10, 5}) {
      const Placement middle = fastest;
      if (text_of(middle) == whole) return;
      for (const std::int64_t percent : {-apart, apart})
        try_percent(best, key, middle.memory, middle.device_percent + percent);
    }
    decide(best, key, whole, seconds);
  }

 private:
  struct Tried {
    double seconds = std::numeric_limits<double>::infinity();  ///< of a step; infinite where it does not fit
    bool fills_device = false;                                 ///< then a larger share does not fit either
  };

  Tried try_percent(Choice& best, const PlacedKey& key, const std::string& store, std::int64_t percent) {
    if (percent < 0 || percent > 99) return {};
    PlanOptions trial = best.plan.options;
    Placement& placement = trial.state.*key.placement;
    if (percent == 0 && store == options_.stores.front()) return {};  // it was compared
    placement.memory = store;
    placement.device_percent = percent;
    if (!placement_faults(trial.state).empty()) return {};
    std::string placed;
    for (const PlacedKey& each : kPlacedKeys) placed += text_of(trial.state.*each.placement) + " ";
    const auto [known, is_new] = tried_.try_emplace(placed);
    if (is_new || known->second.seconds < best.plan.seconds_per_step) known->second = try_options(best, trial);
    return known->second;
  }

  /// Takes it where that is faster.
  Tried try_options(Choice& best, const PlanOptions& trial) {
    const PlanTest holds = [this](const Plan& plan) { return limits_.hold(plan); };
    Fit fit = trials_.named(parts_, trial, holds);  // as choose() takes it where these placements are named
    std::optional<Decision> recomputes;
    if (!holds(fit.plan)) {
      const std::int64_t named_bytes = fit.plan.device_total();
      fit = trials_.within(parts_, trial, limits_);
      if (!holds(fit.plan))
        return {.fills_device = fit.plan.ring.bytes == 0 && above(fit.plan.device_total(), limits_.device) > 0};
      recomputes = recompute_decision(options_, fit.choice, named_bytes);
    }
    add_estimates(fit.plan, parts_.device);
    const double seconds = fit.plan.seconds_per_step;
    if (seconds >= best.plan.seconds_per_step) return {seconds};
    std::vector<Decision>& decisions = fit.plan.decisions = std::move(best.plan.decisions);
    std::erase_if(decisions, [](const Decision& decision) { return decision.key == kRecomputeKey; });
    if (recomputes) decisions.push_back(std::move(*recomputes));
    best.recompute = std::move(fit.choice);
    best.plan = std::move(fit.plan);
    return {seconds};
  }

  static void decide(Choice& best, const PlacedKey& key, const std::string& whole, double seconds) {
    const std::string value = text_of(best.plan.options.state.*key.placement);
    for (Decision& decision : best.plan.decisions)
      if (decision.key == key.key) {
        decision.value = value;
        decision.assignment = std::string(key.key) + "=" + value;
        decision.reason = "all of it " + (whole == kOnDevice ? "on the device" : "in `" + whole + "`") +
                          " a step takes " + format_duration(seconds);
      }
  }

  Trials& trials_;
  const PlanParts& parts_;
  const PlanOptions& options_;
  const Limits limits_;
  std::map<std::string, Tried> tried_ = {};  ///< by placements
};

/// Whether it recomputes more than the config's own.
bool recomputes_more(const Choice& choice) {
  const std::vector<Decision>& decisions = choice.plan.decisions;
  return std::any_of(decisions.begin(), decisions.end(), [](const auto& d) { return d.key == kRecomputeKey; });
}

}  // namespace

void try_chunks(Trials& trials, const PlanParts& parts, const PlanOptions& options, Choice& best) {
  if (chooses(options) && options.train && options.loss_chunk == 0) Search(trials, parts, options).run_chunks(best);
}

void try_shares(Trials& trials, const PlanParts& parts, const PlanOptions& options, Choice& best) {
  if (!chooses(options) || !options.train || options.stores.empty()) return;
  constexpr const PlacedKey &kMoments = kPlacedKeys[1], &kActivations = kPlacedKeys[4];
  static_assert(kMoments.placement == &StatePlacement::moments);
  static_assert(kActivations.placement == &StatePlacement::activations);
  auto is_open = [&](const PlacedKey& key) { return (options.state.*key.placement).memory == kAuto; };
  auto stays = [](const Choice& choice, const PlacedKey& key) {
    return (choice.plan.options.state.*key.placement).memory == kOnDevice;
  };
  if (std::none_of(std::begin(kPlacedKeys), std::end(kPlacedKeys), is_open)) return;
  Search shares(trials, parts, options);
  auto search = [&](Choice& choice, bool moments_first) {
    if (moments_first) shares.run(choice, kMoments);
    for (auto key = std::rbegin(kPlacedKeys); key != std::rend(kPlacedKeys); ++key) {
      if (!is_open(*key) || (moments_first && &*key == &kMoments)) continue;
      if (&*key == &kActivations || !stays(choice, *key)) shares.run(choice, *key);
    }
  };
  // Room for activations may be worth more than some moments' transfers, once a step.
  std::optional<Choice> other;
  if (is_open(kMoments) && stays(best, kMoments) && (recomputes_more(best) || !stays(best, kActivations)))
    search(other.emplace(best), true);
  search(best, false);
  if (other && other->plan.seconds_per_step < best.plan.seconds_per_step) best = std::move(*other);
}

void keep_reused(const PlanParts& parts, const PlanOptions& options, Choice& best) {
  Plan& plan = best.plan;
  const std::int64_t room = limits_of(parts, options).device - plan.device_total();
  if (!best.fits || !chooses(options) || plan.ring.bytes == 0 || plan.options.kept_bytes > 0 || room <= 0) return;
  const std::int64_t bytes = std::min(room / plan.alignment * plan.alignment,
                                      reused_bytes(make_schedules(plan), plan.alignment, plan.ring.spare));
  if (bytes == 0) return;
  plan.options.kept_bytes = bytes;
  lay_out_kept(plan);
  add_estimates(plan, parts.device);
}

}  // namespace quern
