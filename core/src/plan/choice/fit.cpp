#include "plan/choice/fit.h"

#include <utility>

#include "plan/time/estimate.h"

namespace quern {

RecomputePath path_for(const PlanParts& parts, const PlanOptions& options, const ProgramSet& lowered) {
  auto bytes = [&](const Value& value) {
    return static_cast<double>(byte_count(extents_at(value.shape, options.geometry), value.dtype));
  };
  auto seconds = [&](const Program& program) {
    return program_seconds(lowered.fused(program), lowered.ops(), options.geometry, parts.device);
  };
  return recompute_path(lowered.typical().lowered.joint, lowered.ops(), bytes, seconds);
}

Fit fit_named(const PlanParts& parts, const PlanOptions& options, const ProgramSet& lowered,
              const PlanTest& worth_slots) {
  Fit named{.choice = {.recomputed = lowered.recomputed(options.recompute)}, .plan = {}};
  named.plan = plan_with(parts, options, lowered, named.choice, worth_slots);
  return named;
}

// Programs that keep less also need more transient memory, so what fits is found by laying plans out. All layers get
// the step of the path that fits them all, and as many as there is room for the next one. A few steps are tried from
// the least recomputation on; between the first that fits and the one before it the border is found by halves.
Fit fit_within(const PlanParts& parts, const PlanOptions& options, const ProgramSet& lowered, const RecomputePath& path,
               const PlanTest& fits_all) {
  constexpr std::size_t kProbes = 4;
  auto trial = [&](RecomputeChoice choice) {
    Plan plan = plan_with(parts, options, lowered, choice, fits_all);
    return Fit{std::move(choice), std::move(plan)};
  };
  const std::size_t last = path.size() - 1;
  std::size_t step = last, too_little = path.size();
  Fit fit = trial({.recomputed = path[step]});
  for (std::size_t probe = kProbes; probe-- > 0 && step > 0 && !fits_all(fit.plan);) {
    too_little = std::exchange(step, last * probe / kProbes);
    fit = trial({.recomputed = path[step]});
  }
  while (fits_all(fit.plan) && too_little - step > 1) {
    const std::size_t middle = (step + too_little) / 2;
    Fit less = trial({.recomputed = path[middle]});
    if (!fits_all(less.plan)) {
      too_little = middle;
    } else {
      step = middle;
      fit = std::move(less);
    }
  }
  if (!fits_all(fit.plan)) fit.plan = plan_with(parts, options, lowered, fit.choice, [](const Plan&) { return true; });
  if (!fits_all(fit.plan) || step + 1 == path.size()) return fit;
  std::int64_t fits = 0, too_many = fit.plan.model.layers;
  while (too_many - fits > 1) {
    const std::int64_t middle = (fits + too_many) / 2;
    Fit more = trial({.recomputed = path[step], .fewer = path[step + 1], .richer_layers = middle});
    if (!fits_all(more.plan)) {
      too_many = middle;
    } else {
      fits = middle;
      fit = std::move(more);
    }
  }
  return fit;
}

}  // namespace quern
