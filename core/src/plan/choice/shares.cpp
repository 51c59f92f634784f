#include "plan/choice/shares.h"

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

  /// Percents that are far apart, then those beside the fastest of them.
  void run(const PlacedKey& key) {
    const std::string whole = (best_.plan.options.state.*key.placement).memory;
    const double seconds = best_.plan.seconds_per_step;
    for (const std::int64_t percent : {20, 40, 60, 80}) try_percent(key, percent);
    const std::int64_t found = (best_.plan.options.state.*key.placement).device_percent;
    if (found == 0) return;
    for (const std::int64_t percent : {found - 10, found + 10}) try_percent(key, percent);
    decide(key, whole, seconds);
  }

 private:
  void try_percent(const PlacedKey& key, std::int64_t percent) {
    PlanOptions trial = best_.plan.options;
    Placement& placement = trial.state.*key.placement;
    placement.memory = options_.store;
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

}  // namespace

void try_chunks(const PlanParts& parts, const PlanOptions& options, Choice& best) {
  if (chooses(options) && options.train && options.loss_chunk == 0) Search(parts, options, best).run_chunks();
}

void try_shares(const PlanParts& parts, const PlanOptions& options, Choice& best) {
  if (!chooses(options) || !options.train || options.store.empty()) return;
  std::optional<Search> search;
  for (auto key = std::rbegin(kPlacedKeys); key != std::rend(kPlacedKeys); ++key) {
    const Placement& placement = best.plan.options.state.*key->placement;
    if ((options.state.*key->placement).memory != kAuto) continue;
    if (placement.memory == kOnDevice && key->placement != &StatePlacement::activations) continue;
    if (!search) search.emplace(parts, options, best);
    search->run(*key);
  }
}

Choice choose_with_shares(const PlanParts& parts, const PlanOptions& options) {
  Choice choice = choose(parts, options);
  if (choice.fits) try_shares(parts.with(*choice.precision), options, choice);
  return choice;
}

}  // namespace quern
