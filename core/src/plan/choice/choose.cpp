#include "plan/choice/choose.h"

#include <algorithm>
#include <bit>
#include <deque>
#include <limits>
#include <optional>
#include <utility>

#include "base/format.h"
#include "plan/choice/shares.h"
#include "quern/checked.h"

namespace quern {

namespace {

constexpr std::int64_t kMostTokens = std::int64_t{1} << 18;  // of a micro-batch; more makes no step faster

/// Whether the head's transient memory, logits for the most part, limits recomputation: the layers', which
/// changes with it, is not much more.
bool head_binds(const Plan& plan) {
  std::int64_t layers = 0;
  for (const LayerClass& layer : plan.classes)
    layers = std::max({layers, layer.forward.bytes, layer.backward.bytes, layer.evaluate.bytes});
  return std::max(plan.head_train.bytes, plan.head_evaluate.bytes) > layers / 4 * 3;
}

/// A way to place what the options leave open.
struct Candidate {
  unsigned away = 0;  // bit i: the i-th open key's state is in the store
  PlanOptions options;
  Fit fit = {};                  // as the options name, or once it is tried as it fits
  std::int64_t named_bytes = 0;  // of the device, with the options' own recomputation
  std::int64_t least_bytes = 0;  // of the device, whatever is recomputed and without slots; or a bound of it
  bool planned = true;           // false: there is only that bound
  double seconds = 0;            // of a step; before it is tried, at least
  bool tried = false, fits = false;
};

class Comparison {
 public:
  Comparison(Trials& trials, const PlanParts& parts, const PlanOptions& options)
      : trials_(trials), parts_(parts), options_(options), limits_(limits_of(parts, options)) {
    for (const PlacedKey& key : kPlacedKeys)
      if ((options.state.*key.placement).memory == kAuto) open_.push_back(&key);
  }

  /// The fastest of those that fit and take less than `limit` seconds; none: there is none.
  std::optional<Choice> best(double limit = std::numeric_limits<double>::infinity()) {
    const std::size_t ways = chooses(options_) && !options_.stores.empty() ? std::size_t{1} << open_.size() : 1;
    std::vector<unsigned> order(ways);
    for (std::size_t way = 0; way < ways; ++way) order[way] = static_cast<unsigned>(way);
    std::stable_sort(order.begin(), order.end(), [](auto a, auto b) { return std::popcount(a) < std::popcount(b); });
    for (const unsigned away : order) add(away);
    std::stable_sort(candidates_.begin(), candidates_.end(),
                     [](const Candidate& a, const Candidate& b) { return a.seconds < b.seconds; });
    Candidate* best = nullptr;
    for (Candidate& candidate : candidates_) {
      if (candidate.seconds >= limit) break;
      if (!candidate.tried) try_to_fit(candidate);
      if (!candidate.fits || candidate.seconds >= limit) continue;
      best = &candidate;
      limit = candidate.seconds;
    }
    if (!best) return std::nullopt;
    return taken(*best);
  }

  /// After best(): the choice that lacks least, with all that helps recomputed.
  Choice nearest() {
    for (Candidate& candidate : candidates_)
      if (!candidate.planned) plan(candidate);
    auto missing = [&](const Candidate& candidate) {
      const Plan& plan = candidate.fit.plan;
      return least_stored_above(plan) + std::max<std::int64_t>(least_device_bytes(plan) - limits_.device, 0);
    };
    auto least = std::min_element(candidates_.begin(), candidates_.end(),
                                  [&](const auto& a, const auto& b) { return missing(a) < missing(b); });
    if (searches()) try_to_fit(*least);
    if (searches() && !least->fits)  // with slots
      least->fit.plan = trials_.plan(parts_, least->options, least->fit.choice, [](const Plan&) { return true; });
    return {std::move(least->fit.choice), std::move(least->fit.plan), false, &parts_.precision};
  }

  /// After best(): of the first that was compared.
  bool head_binds() const { return !candidates_.empty() && quern::head_binds(candidates_.front().fit.plan); }

  /// After best(): what a step takes at least; none: nothing fits.
  std::optional<double> least_seconds() const {
    std::optional<double> least;
    for (const Candidate& candidate : candidates_)
      if (candidate.fits || !candidate.tried) least = std::min(least.value_or(candidate.seconds), candidate.seconds);
    return least;
  }

 private:
  // A candidate that fits with the options' own recomputation makes those needless that also move other state.
  void add(unsigned away) {
    for (const Candidate& known : candidates_)
      if (known.fits && (known.away & away) == known.away) return;
    Candidate candidate{.away = away, .options = options_};
    for (std::size_t i = 0; i < open_.size(); ++i)
      (candidate.options.state.*open_[i]->placement).memory =
          away >> i & 1 ? options_.stores.front() : std::string(kOnDevice);
    if (!placement_faults(candidate.options.state).empty() && away != 0) return;
    candidate.least_bytes = least_bound(away);
    if (searches() && limits_.device > 0 && candidate.least_bytes > limits_.device) {
      candidate.planned = false;
      candidate.tried = true;
    } else {
      plan(candidate);
    }
    candidates_.push_back(std::move(candidate));
  }

  /// Keys free at most what each of them frees alone. 0: nothing is known.
  std::int64_t least_bound(unsigned away) const {
    if (std::popcount(away) < 2) return 0;
    auto least_of = [&](unsigned keys) -> std::int64_t {
      for (const Candidate& known : candidates_)
        if (known.away == keys) return known.least_bytes;
      return 0;
    };
    const std::int64_t none = least_of(0);
    std::int64_t bytes = none;
    for (std::size_t i = 0; i < open_.size(); ++i)
      if (away >> i & 1) bytes -= none - least_of(1u << i);
    return bytes;
  }

  void plan(Candidate& candidate) {
    candidate.planned = true;
    candidate.fit = trials_.named(parts_, candidate.options, [&](const Plan& plan) {
      candidate.least_bytes = least_device_bytes(plan);
      return !searches() || !hopeless(plan);
    });
    Plan& plan = candidate.fit.plan;
    if (plan.stores.empty()) candidate.least_bytes = least_device_bytes(plan);
    candidate.named_bytes = plan.device_total();
    candidate.fits = limits_.hold(plan);
    candidate.tried = candidate.fits || !searches() || hopeless(plan);
    if (candidate.fits || !candidate.tried) {
      add_estimates(plan, parts_.device);
      candidate.seconds = plan.seconds_per_step;
      if (!candidate.fits && plan.options.state.activations.memory != kOnDevice)
        candidate.seconds = seconds_without(candidate.away);
    }
  }

  /// Of a step whose activations stay on the device: at least what one takes that recomputes some, and moves fewer.
  double seconds_without(unsigned away) const {
    for (std::size_t i = 0; i < open_.size(); ++i)
      if (open_[i]->placement == &StatePlacement::activations) away &= ~(1u << i);
    for (const Candidate& known : candidates_)
      if (known.away == away) return known.seconds;
    return 0;
  }

  /// Whether more than the options name may be recomputed.
  bool searches() const { return chooses(options_) && options_.train; }

  /// Whether no recomputation makes it fit.
  bool hopeless(const Plan& plan) const {
    return least_stored_above(plan) > 0 || least_device_bytes(plan) > limits_.device;
  }

  /// What no recomputation frees.
  std::int64_t least_device_bytes(const Plan& plan) const {
    if (limits_.device == 0) return 0;
    std::int64_t bytes = plan.device_total();
    const bool in_slots = plan.options.state.activations.memory != kOnDevice;
    for (const OwnerBytes& owner : plan.owners)
      if (owner.store < 0 &&
          (owner.owner == kSavedActivations || owner.owner == kTransient || (in_slots && owner.owner == kSlots)))
        bytes -= owner.bytes;
    return bytes;
  }

  /// Activations in a store.
  static std::int64_t saved_in(const Plan& plan, std::size_t store) {
    for (const OwnerBytes& owner : plan.owners)
      if (owner.owner == kSavedActivations && owner.store == static_cast<std::int32_t>(store)) return owner.bytes;
    return 0;
  }

  /// What no recomputation frees of host memory, or of stores elsewhere.
  static std::int64_t least_stored(const Plan& plan, bool host) {
    std::int64_t bytes = host ? plan.host_bytes() : plan.disk_bytes();
    for (std::size_t i = 0; i < plan.stores.size(); ++i)
      if (plan.stores[i].in_host_memory == host) bytes -= saved_in(plan, i);
    return bytes;
  }

  /// What no recomputation frees of the bytes above the limits.
  std::int64_t least_stored_above(const Plan& plan) const {
    std::int64_t bytes = above(least_stored(plan, true), limits_.host) + above(least_stored(plan, false), limits_.disk);
    for (std::size_t i = 0; i < plan.stores.size(); ++i)
      bytes += above(plan.stores[i].bytes - saved_in(plan, i), plan.stores[i].capacity);
    return bytes;
  }

  void try_to_fit(Candidate& candidate) {
    candidate.fit = trials_.within(parts_, candidate.options, limits_);
    candidate.tried = true;
    candidate.fits = limits_.hold(candidate.fit.plan);
    if (!candidate.fits) return;
    add_estimates(candidate.fit.plan, parts_.device);
    candidate.seconds = candidate.fit.plan.seconds_per_step;
  }

  Choice taken(Candidate& best) {
    std::vector<Decision> decisions;
    if (searches()) {
      for (std::size_t i = 0; i < open_.size() && !options_.stores.empty(); ++i) {
        const std::string &memory = (best.options.state.*open_[i]->placement).memory, key = open_[i]->key;
        decisions.push_back({key, std::string(kAuto), memory, reason(best, i), key + "=" + memory});
      }
      if (best.named_bytes > best.fit.plan.device_total())
        decisions.push_back(recompute_decision(options_, best.fit.choice, best.named_bytes));
    }
    best.fit.plan.decisions = std::move(decisions);
    return {std::move(best.fit.choice), std::move(best.fit.plan), true, &parts_.precision};
  }

  /// What it would be with this key's state at the other place.
  std::string reason(const Candidate& best, std::size_t key) const {
    const unsigned other = best.away ^ 1u << key;
    const std::string there = other >> key & 1 ? "in `" + options_.stores.front() + "`" : "on the device";
    for (const Candidate& known : candidates_) {
      if (known.away != other) continue;
      if (known.tried && !known.fits) {
        const Plan& plan = known.fit.plan;
        const std::string prefix = there + " the run does not fit: ";
        if (!known.planned || Limits{0, limits_.host, limits_.disk}.hold(plan))
          return prefix + sized(known.least_bytes) + " of the device and more";
        const bool host = above(plan.host_bytes(), limits_.host) > 0;
        const std::string memory = host ? " of host memory" : " on disk";
        const std::int64_t least = least_stored(plan, host);
        return prefix + (above(least, host ? limits_.host : limits_.disk) > 0
                             ? sized(least) + memory + " and more"
                             : sized(host ? plan.host_bytes() : plan.disk_bytes()) + memory);
      }
      return there + (known.tried ? " a step takes " : " a step takes at least ") + format_duration(known.seconds);
    }
    return "there is room for it";
  }

  Trials& trials_;
  const PlanParts& parts_;
  const PlanOptions& options_;
  const Limits limits_;
  std::vector<const PlacedKey*> open_;  // keys that are left to the planner
  std::vector<Candidate> candidates_;
};

/// A comparison for each form of the precision backend.
class Forms {
 public:
  Forms(Trials& trials, const PlanParts& parts, const PlanOptions& options) : forms_(parts.forms), options_(options) {
    if (!options.train) forms_.clear();
    for (const PrecisionForm& form : forms_) parts_.push_back(parts.with(*form.backend));
    if (forms_.empty()) parts_.push_back(parts);
    for (const PlanParts& form : parts_) comparisons_.emplace_back(trials, form, options);
  }

  /// As Comparison's. Without a budget it is of the first form that has one.
  std::optional<Choice> best(double limit = std::numeric_limits<double>::infinity()) {
    std::optional<Choice> best;
    for (Comparison& comparison : comparisons_) {
      std::optional<Choice> choice = comparison.best(limit);
      if (!choice) continue;
      best = std::move(choice);
      limit = best->plan.seconds_per_step;
      if (!chooses(options_)) break;
    }
    if (best && forms_.size() > 1) explain(*best);
    return best;
  }

  /// After best().
  bool head_binds() const { return comparisons_.front().head_binds(); }
  Choice nearest() {
    const Limits limits = limits_of(parts_.front(), options_);
    std::optional<Choice> least;
    for (Comparison& comparison : comparisons_) {
      Choice choice = comparison.nearest();
      if (!least || limits.missing(choice.plan) < limits.missing(least->plan)) least = std::move(choice);
    }
    return std::move(*least);
  }

 private:
  void explain(Choice& best) {
    const auto is_best = [&](const PrecisionForm& form) { return form.backend == best.precision; };
    const auto taken = std::find_if(forms_.begin(), forms_.end(), is_best);
    if (!chooses(options_) && taken == forms_.begin()) return;  // no other was looked at
    const std::size_t other = taken == forms_.begin() ? 1 : 0;
    std::string otherwise = "otherwise the run does not fit";
    if (const std::optional<double> seconds = comparisons_[other].least_seconds())
      otherwise = "otherwise a step takes at least " + format_duration(*seconds);
    for (const auto& [key, value] : taken->values)
      best.plan.decisions.push_back({key, std::string(kAuto), value, otherwise, key + "=" + value});
  }

  std::vector<PrecisionForm> forms_;
  const PlanOptions& options_;
  std::deque<PlanParts> parts_;
  std::deque<Comparison> comparisons_;
};

}  // namespace

std::optional<Choice> choose_fitting(const PlanParts& parts, const PlanOptions& options) {
  Trials trials;
  return Forms(trials, parts, options).best();
}

Choice choose(Trials& trials, const PlanParts& parts, const PlanOptions& options) {
  Forms forms(trials, parts, options);
  std::optional<Choice> best = forms.best();
  return best ? std::move(*best) : forms.nearest();
}

Choice choose(const PlanParts& parts, const PlanOptions& options) {
  Trials trials;
  return choose(trials, parts, options);
}

Choice choose_with_shares(Trials& trials, const PlanParts& parts, const PlanOptions& options) {
  Choice choice = choose(trials, parts, options);
  if (!choice.fits) return choice;
  try_shares(trials, parts.with(*choice.precision), options, choice);
  keep_reused(parts.with(*choice.precision), options, choice);
  return choice;
}

Choice choose_with_micro_batch(Trials& trials, const PlanParts& parts, const PlanOptions& options) {
  const std::int64_t sequences = checked_product(options.geometry.batch, options.accumulation);
  const bool fewer_logits = chooses(options) && options.loss_chunk == 0;
  std::optional<Choice> best;
  PlanOptions best_options;
  bool logits_bind = false;  // of the last that was tried
  auto is_faster = [&](const PlanOptions& trial) {
    Forms forms(trials, parts, trial);
    std::optional<Choice> choice = best ? forms.best(best->plan.seconds_per_step) : forms.best();
    logits_bind = fewer_logits && forms.head_binds();
    if (!choice) return false;
    best = std::move(choice);
    best_options = trial;
    return true;
  };
  int slower = 0;  // in a row
  for (std::int64_t batch = sequences; batch > 0 && slower < 2; --batch) {
    if (sequences % batch != 0 || batch * options.geometry.sequence > kMostTokens) continue;
    PlanOptions trial = options;
    trial.geometry.batch = batch;
    trial.accumulation = sequences / batch;
    trial.uploads = uploads_for(trial.accumulation);
    bool faster = is_faster(trial);
    if (!faster && logits_bind) {
      trial.loss_chunk = kSmallChunk;
      faster = is_faster(trial);
    }
    if (best) slower = faster ? 0 : slower + 1;
  }
  if (!best) return choose(trials, parts, options);
  auto improved = [&](Choice choice) {
    best_options.loss_chunk = options.loss_chunk;
    try_shares(trials, parts.with(*choice.precision), best_options, choice);
    try_chunks(trials, parts.with(*choice.precision), best_options, choice);
    return choice;
  };
  best = improved(std::move(*best));
  if (fewer_logits && best->plan.options.loss_chunk == 0 && head_binds(best->plan)) {
    best_options.loss_chunk = kSmallChunk;
    Forms forms(trials, parts, best_options);
    if (std::optional<Choice> other = forms.best())
      if (other = improved(std::move(*other)); other->plan.seconds_per_step < best->plan.seconds_per_step)
        best = std::move(other);
  }
  keep_reused(parts.with(*best->precision), best_options, *best);
  auto decide = [&](const std::string& key, std::int64_t configured, std::int64_t value) {
    const std::string text = std::to_string(value);
    best->plan.decisions.push_back(
        {key, std::to_string(configured), text, "the fastest for a step's sequences", key + "=" + text});
  };
  const int ranks = options.state.ranks;
  if (const std::int64_t chunk = best->plan.options.loss_chunk; chunk != options.loss_chunk)
    decide("train.loss_chunk", options.loss_chunk, chunk);
  decide("train.micro_batch", options.geometry.batch, best->plan.options.geometry.batch);
  decide("train.accumulation", options.accumulation * ranks, best->plan.options.accumulation * ranks);
  return std::move(*best);
}

Choice choose_with_micro_batch(const PlanParts& parts, const PlanOptions& options) {
  Trials trials;
  return choose_with_micro_batch(trials, parts, options);
}

Choice choose_with_sharding(const PlanParts& parts, const PlanOptions& options) {
  Trials trials;
  using State = StatePlacement;
  constexpr Placement State::*kStages[][2] = {
      {&State::master, &State::moments}, {&State::gradients, nullptr}, {&State::weights, nullptr}};
  const Limits limits = limits_of(parts, options);
  auto is_better = [&](const Choice& a, const Choice& b) {
    if (a.fits != b.fits) return a.fits;
    return a.fits ? a.plan.seconds_per_step < b.plan.seconds_per_step : limits.missing(a.plan) < limits.missing(b.plan);
  };
  PlanOptions trial = options;
  Choice best = choose_with_micro_batch(trials, parts, trial);
  std::string stage = "0", taken = stage;
  for (const auto& shards : kStages) {
    for (Placement State::*kind : shards)
      if (kind) (trial.state.*kind).sharding = Sharding::ranks;
    stage = std::to_string(std::stoi(stage) + 1);
    if (!placement_faults(trial.state).empty()) break;
    Choice choice = choose_with_micro_batch(trials, parts, trial);
    if (!is_better(choice, best)) continue;
    best = std::move(choice);
    taken = stage;
  }
  best.plan.decisions.push_back({"parallel.zero", "0", taken, "the fastest stage that fits", "parallel.zero=" + taken});
  return best;
}

}  // namespace quern
