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
        path_(path_for(parts, options)),
        best_(best) {}

  void run_chunks() {
    for (const std::int64_t chunk : {std::int64_t{4096}, std::int64_t{2048}, std::int64_t{1024}, std::int64_t{512}}) {
      PlanOptions trial = best_.plan.options;
      trial.loss_chunk = chunk;
      if (chunk < trial.geometry.tokens()) try_options(trial);
    }
  }

  /// Percents that are far apart, then those beside the fastest of them. State that is used once a step may be in any
  /// store, also in one where kernels read and write it in place.
  void run(const PlacedKey& key) {
    const std::string whole = text_of(found(key));
    const double seconds = best_.plan.seconds_per_step;
    for (const std::string& store : options_.stores) {
      for (const std::int64_t percent : {0, 20, 40, 60, 80}) try_percent(key, store, percent);
      if (key.placement != &StatePlacement::master && key.placement != &StatePlacement::moments) break;
    }
    for (const std::int64_t apart : {10, 5}) {
      const Placement fastest = found(key);
      if (text_of(fastest) == whole) return;
      for (const std::int64_t percent : {-apart, apart})
        try_percent(key, fastest.memory, fastest.device_percent + percent);
    }
    decide(key, whole, seconds);
  }

 private:
  const Placement& found(const PlacedKey& key) const { return best_.plan.options.state.*key.placement; }

  void try_percent(const PlacedKey& key, const std::string& store, std::int64_t percent) {
    if (percent < 0 || percent > 99) return;
    PlanOptions trial = best_.plan.options;
    Placement& placement = trial.state.*key.placement;
    if (percent == 0 && (placement.memory == store || store == options_.stores.front())) return;  // it was compared
    placement.memory = store;
    placement.device_percent = percent;
    if (placement_faults(trial.state).empty()) try_options(trial);
  }

  void try_options(const PlanOptions& trial) {
    Fit fit = fit_within(parts_, trial, path_, [&](const Plan& plan) { return limits_.hold(plan); });
    if (!limits_.hold(fit.plan)) return;
    add_schedules(fit.plan, parts_.device);
    if (fit.plan.seconds_per_step >= best_.plan.seconds_per_step) return;
    fit.plan.decisions = std::move(best_.plan.decisions);
    best_.recompute = std::move(fit.choice);
    best_.plan = std::move(fit.plan);
  }

  void decide(const PlacedKey& key, const std::string& whole, double seconds) {
    const std::string value = text_of(best_.plan.options.state.*key.placement);
    for (Decision& decision : best_.plan.decisions)
      if (decision.key == key.key) {
        decision.value = value;
        decision.assignment = std::string(key.key) + "=" + value;
        decision.reason = "all of it in `" + whole + "` a step takes " + format_duration(seconds);
      } else if (decision.key == kRecomputeKey) {
        decision.value = text_of(best_.recompute);
      }
  }

  const PlanParts& parts_;
  const PlanOptions& options_;
  const Limits limits_;
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
  auto is_open = [&](const PlacedKey& key) { return (options.state.*key.placement).memory == kAuto; };
  auto stays = [&](const PlacedKey& key) { return (best.plan.options.state.*key.placement).memory == kOnDevice; };
  // Room for activations may be worth more than some moments' transfers, once a step.
  constexpr const PlacedKey &kMoments = kPlacedKeys[1], &kActivations = kPlacedKeys[4];
  std::optional<Choice> moments_first;
  if (is_open(kMoments) && stays(kMoments) && (recomputes_more(best) || !stays(kActivations))) {
    moments_first = best;
    Search search(parts, options, *moments_first);
    search.run(kMoments);
    if (is_open(kActivations)) search.run(kActivations);
  }
  std::optional<Search> search;
  for (auto key = std::rbegin(kPlacedKeys); key != std::rend(kPlacedKeys); ++key) {
    if (!is_open(*key) || (stays(*key) && key->placement != &StatePlacement::activations)) continue;
    if (!search) search.emplace(parts, options, best);
    search->run(*key);
  }
  if (moments_first && moments_first->plan.seconds_per_step < best.plan.seconds_per_step)
    best = std::move(*moments_first);
}

Choice choose_with_shares(const PlanParts& parts, const PlanOptions& options) {
  Choice choice = choose(parts, options);
  if (choice.fits) try_shares(parts.with(*choice.precision), options, choice);
  return choice;
}

}  // namespace quern
