#include "plan/choice/shares.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/format.h"
#include "plan/choice/fit.h"

namespace quern {

namespace {

class Search {
 public:
  Search(const PlanParts& parts, const PlanOptions& options, Choice& best)
      : parts_(parts),
        options_(options),
        limits_(limits_of(parts, options)),
        lowered_(parts, best.plan.options),
        path_(path_for(parts, options, lowered_)),
        best_(best) {}

  void run_chunks() {
    for (const std::int64_t chunk : {std::int64_t{4096}, std::int64_t{2048}, std::int64_t{1024}, std::int64_t{512}}) {
      PlanOptions trial = best_.plan.options;
      trial.loss_chunk = chunk;
      if (chunk < trial.geometry.tokens()) try_options(trial, ProgramSet(parts_, trial));
    }
  }

  /// Percents that are far apart, then those beside the fastest of them. State that is used once a step may be in any
  /// store, also in one where kernels read and write it in place.
  void run(const PlacedKey& key) {
    const std::string whole = text_of(so_far(key));
    const double seconds = best_.plan.seconds_per_step;
    for (const std::string& store : options_.stores) {
      for (const std::int64_t percent : {0, 20, 40, 60, 80}) try_percent(key, store, percent);
      if (key.placement != &StatePlacement::master && key.placement != &StatePlacement::moments) break;
    }
    for (const std::int64_t apart : {10, 5}) {
      const Placement fastest = so_far(key);
      if (text_of(fastest) == whole) return;
      for (const std::int64_t percent : {-apart, apart})
        try_percent(key, fastest.memory, fastest.device_percent + percent);
    }
    decide(key, whole, seconds);
  }

 private:
  const Placement& so_far(const PlacedKey& key) const { return best_.plan.options.state.*key.placement; }

  void try_percent(const PlacedKey& key, const std::string& store, std::int64_t percent) {
    if (percent < 0 || percent > 99) return;
    PlanOptions trial = best_.plan.options;
    Placement& placement = trial.state.*key.placement;
    if (percent == 0 && store == options_.stores.front()) return;  // it was compared
    placement.memory = store;
    placement.device_percent = percent;
    if (placement_faults(trial.state).empty()) try_options(trial, lowered_);
  }

  void try_options(const PlanOptions& trial, const ProgramSet& lowered) {
    const PlanTest holds = [this](const Plan& plan) { return limits_.hold(plan); };
    Fit fit = fit_named(parts_, trial, lowered, holds);  // as choose() takes it where these placements are named
    std::optional<Decision> recomputes;
    if (!holds(fit.plan)) {
      const std::int64_t named_bytes = fit.plan.device_total();
      fit = fit_within(parts_, trial, lowered, path_, holds);
      if (!holds(fit.plan)) return;
      recomputes = recompute_decision(options_, fit.choice, named_bytes);
    }
    add_schedules(fit.plan, parts_.device);
    if (fit.plan.seconds_per_step >= best_.plan.seconds_per_step) return;
    std::vector<Decision>& decisions = fit.plan.decisions = std::move(best_.plan.decisions);
    std::erase_if(decisions, [](const Decision& decision) { return decision.key == kRecomputeKey; });
    if (recomputes) decisions.push_back(std::move(*recomputes));
    best_.recompute = std::move(fit.choice);
    best_.plan = std::move(fit.plan);
  }

  void decide(const PlacedKey& key, const std::string& whole, double seconds) {
    const std::string value = text_of(so_far(key));
    for (Decision& decision : best_.plan.decisions)
      if (decision.key == key.key) {
        decision.value = value;
        decision.assignment = std::string(key.key) + "=" + value;
        decision.reason = "all of it " + (whole == kOnDevice ? "on the device" : "in `" + whole + "`") +
                          " a step takes " + format_duration(seconds);
      }
  }

  const PlanParts& parts_;
  const PlanOptions& options_;
  const Limits limits_;
  const ProgramSet lowered_;
  const RecomputePath path_;
  Choice& best_;
};

/// Whether it recomputes more than the config's own.
bool recomputes_more(const Choice& choice) {
  const std::vector<Decision>& decisions = choice.plan.decisions;
  return std::any_of(decisions.begin(), decisions.end(), [](const auto& d) { return d.key == kRecomputeKey; });
}

}  // namespace

void try_chunks(const PlanParts& parts, const PlanOptions& options, Choice& best) {
  if (chooses(options) && options.train && options.loss_chunk == 0) Search(parts, options, best).run_chunks();
}

void try_shares(const PlanParts& parts, const PlanOptions& options, Choice& best) {
  if (!chooses(options) || !options.train || options.stores.empty()) return;
  constexpr const PlacedKey &kMoments = kPlacedKeys[1], &kActivations = kPlacedKeys[4];
  static_assert(kMoments.placement == &StatePlacement::moments);
  static_assert(kActivations.placement == &StatePlacement::activations);
  auto is_open = [&](const PlacedKey& key) { return (options.state.*key.placement).memory == kAuto; };
  auto stays = [](const Choice& choice, const PlacedKey& key) {
    return (choice.plan.options.state.*key.placement).memory == kOnDevice;
  };
  auto search = [&](Choice& choice, bool moments_first) {
    Search shares(parts, options, choice);
    if (moments_first) shares.run(kMoments);
    for (auto key = std::rbegin(kPlacedKeys); key != std::rend(kPlacedKeys); ++key) {
      if (!is_open(*key) || (moments_first && &*key == &kMoments)) continue;
      if (&*key == &kActivations || !stays(choice, *key)) shares.run(*key);
    }
  };
  if (std::none_of(std::begin(kPlacedKeys), std::end(kPlacedKeys), is_open)) return;
  // Room for activations may be worth more than some moments' transfers, once a step.
  std::optional<Choice> other;
  if (is_open(kMoments) && stays(best, kMoments) && (recomputes_more(best) || !stays(best, kActivations)))
    search(other.emplace(best), true);
  search(best, false);
  if (other && other->plan.seconds_per_step < best.plan.seconds_per_step) best = std::move(*other);
}

Choice choose_with_shares(const PlanParts& parts, const PlanOptions& options) {
  Choice choice = choose(parts, options);
  if (choice.fits) try_shares(parts.with(*choice.precision), options, choice);
  return choice;
}

}  // namespace quern
