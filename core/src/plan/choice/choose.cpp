#include "plan/choice/choose.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "base/format.h"
#include "plan/choice/fit.h"
#include "quern/checked.h"

namespace quern {

namespace {

constexpr std::int64_t kMostTokens = std::int64_t{1} << 18;  // of a micro-batch; more makes no step faster

std::string sized(std::int64_t bytes) { return format_bytes(static_cast<double>(bytes)); }

/// A way to place what the options leave open.
struct Candidate {
  unsigned away = 0;  // bit i: the i-th open key's state is in the store
  PlanOptions options;
  Fit fit = {};                  // as the options name, or once it is tried as it fits
  std::int64_t named_bytes = 0;  // of the device, with the options' own recomputation
  double seconds = 0;            // of a step; before it is tried, at least
  bool tried = false, fits = false;
};

class Comparison {
 public:
  Comparison(const PlanParts& parts, const PlanOptions& options)
      : parts_(parts), options_(options), limits_(limits_of(parts, options)) {
    for (const PlacedKey& key : kPlacedKeys)
      if ((options.state.*key.placement).memory == kAuto) open_.push_back(&key);
  }

  Choice run() {
    const std::size_t ways = chooses(options_) && !options_.store.empty() ? std::size_t{1} << open_.size() : 1;
    std::vector<unsigned> order(ways);
    for (std::size_t way = 0; way < ways; ++way) order[way] = static_cast<unsigned>(way);
    std::stable_sort(order.begin(), order.end(), [](auto a, auto b) { return std::popcount(a) < std::popcount(b); });
    for (const unsigned away : order) add(away);
    std::stable_sort(candidates_.begin(), candidates_.end(),
                     [](const Candidate& a, const Candidate& b) { return a.seconds < b.seconds; });
    Candidate* best = nullptr;
    for (Candidate& candidate : candidates_) {
      if (best && candidate.seconds >= best->seconds) break;
      if (!candidate.tried) try_to_fit(candidate);
      if (candidate.fits && (!best || candidate.seconds < best->seconds)) best = &candidate;
    }
    Choice choice = best ? taken(*best) : nearest();
    choice.precision = &parts_.precision;
    return choice;
  }

 private:
  // A candidate that fits with the options' own recomputation makes those needless that also move other state.
  void add(unsigned away) {
    for (const Candidate& known : candidates_)
      if (known.fits && (known.away & away) == known.away) return;
    Candidate candidate{.away = away, .options = options_};
    for (std::size_t i = 0; i < open_.size(); ++i)
      (candidate.options.state.*open_[i]->placement).memory = away >> i & 1 ? options_.store : std::string(kOnDevice);
    if (!placement_faults(candidate.options.state).empty() && away != 0) return;
    candidate.fit =
        fit_named(parts_, candidate.options, [&](const Plan& plan) { return !searches() || !hopeless(plan); });
    Plan& plan = candidate.fit.plan;
    candidate.named_bytes = plan.device_total();
    candidate.fits = limits_.hold(plan);
    candidate.tried = candidate.fits || !searches() || hopeless(plan);
    if (candidate.fits || !candidate.tried) {
      add_schedules(plan, parts_.device);
      candidate.seconds = plan.seconds_per_step;
      if (!candidate.fits) {
        plan.schedules = {};
        if (plan.options.state.activations.memory != kOnDevice) candidate.seconds = seconds_without(away);
      }
    }
    candidates_.push_back(std::move(candidate));
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
    return (limits_.host > 0 && least_host_bytes(plan) > limits_.host) || least_device_bytes(plan) > limits_.device;
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

  static std::int64_t least_host_bytes(const Plan& plan) {
    std::int64_t bytes = plan.host_bytes();
    for (const OwnerBytes& owner : plan.owners)
      if (owner.owner == kSavedActivations && owner.store >= 0 &&
          plan.stores[static_cast<std::size_t>(owner.store)].in_host_memory)
        bytes -= owner.bytes;
    return bytes;
  }

  void try_to_fit(Candidate& candidate) {
    if (path_.empty()) path_ = path_for(parts_, options_);
    candidate.fit = fit_within(parts_, candidate.options, path_, [&](const Plan& plan) { return limits_.hold(plan); });
    candidate.tried = true;
    candidate.fits = limits_.hold(candidate.fit.plan);
    if (!candidate.fits) return;
    add_schedules(candidate.fit.plan, parts_.device);
    candidate.seconds = candidate.fit.plan.seconds_per_step;
  }

  Choice taken(Candidate& best) {
    std::vector<Decision> decisions;
    if (searches()) {
      for (std::size_t i = 0; i < open_.size() && !options_.store.empty(); ++i) {
        const std::string &memory = (best.options.state.*open_[i]->placement).memory, key = open_[i]->key;
        decisions.push_back({key, std::string(kAuto), memory, reason(best, i), key + "=" + memory});
      }
      if (best.named_bytes > best.fit.plan.device_total())
        decisions.push_back(
            {"memory.recompute", "[" + format_list(options_.recompute) + "]", recomputed(best.fit.choice),
             "with the config's own alone " + sized(best.named_bytes) + " of the device are needed", ""});
    }
    best.fit.plan.decisions = std::move(decisions);
    return {std::move(best.fit.choice), std::move(best.fit.plan), true};
  }

  /// What it would be with this key's state at the other place.
  std::string reason(const Candidate& best, std::size_t key) const {
    const unsigned other = best.away ^ 1u << key;
    const std::string there = other >> key & 1 ? "in `" + options_.store + "`" : "on the device";
    for (const Candidate& known : candidates_) {
      if (known.away != other) continue;
      if (known.tried && !known.fits) {
        const Plan& plan = known.fit.plan;
        const bool host = !Limits{0, limits_.host}.hold(plan);
        return there + " the run does not fit: " +
               (host ? sized(plan.host_bytes()) + " of host memory"
                     : sized(least_device_bytes(plan)) + " of the device and more");
      }
      return there + (known.tried ? " a step takes " : " a step takes at least ") + format_duration(known.seconds);
    }
    return "there is room for it";
  }

  static std::string recomputed(const RecomputeChoice& choice) {
    const std::string text = std::to_string(choice.recomputed.size()) + " values of a layer";
    if (choice.richer_layers == 0) return text;
    return text + ", " + std::to_string(choice.fewer.size()) + " in the first " + std::to_string(choice.richer_layers);
  }

  /// That which lacks least, with all that helps recomputed.
  Choice nearest() {
    auto missing = [&](const Candidate& candidate) {
      const Plan& plan = candidate.fit.plan;
      const std::int64_t host = limits_.host > 0 ? std::max<std::int64_t>(least_host_bytes(plan) - limits_.host, 0) : 0;
      return host + std::max<std::int64_t>(least_device_bytes(plan) - limits_.device, 0);
    };
    auto least = std::min_element(candidates_.begin(), candidates_.end(),
                                  [&](const auto& a, const auto& b) { return missing(a) < missing(b); });
    if (searches()) try_to_fit(*least);
    return {std::move(least->fit.choice), std::move(least->fit.plan), false};
  }

  const PlanParts& parts_;
  const PlanOptions& options_;
  const Limits limits_;
  std::vector<const PlacedKey*> open_;  // keys that are left to the planner
  std::vector<Candidate> candidates_;
  RecomputePath path_;  // empty until it is needed
};

}  // namespace

std::int64_t Limits::missing(const Plan& plan) const {
  auto above = [](std::int64_t bytes, std::int64_t limit) {
    return limit == 0 ? 0 : std::max<std::int64_t>(bytes - limit, 0);
  };
  return above(plan.device_total(), device) + above(plan.host_bytes(), host);
}

Limits limits_of(const PlanParts& parts, const PlanOptions& options) {
  const DeviceTraits& device = parts.device.traits();
  const auto memory = static_cast<std::int64_t>(device.memory_bytes > 0 ? device.memory_bytes + device.own_bytes : 0);
  const std::int64_t budget = options.device_budget;
  return {budget <= 0 ? memory : memory == 0 ? budget : std::min(budget, memory), options.host_budget};
}

bool chooses(const PlanOptions& options) { return options.device_budget > 0 || options.host_budget > 0; }

Choice choose(const PlanParts& parts, const PlanOptions& options) {
  if (parts.forms.empty() || !options.train) return Comparison(parts, options).run();
  const Limits limits = limits_of(parts, options);
  auto better = [&](const Choice& a, const Choice& b) {
    if (a.fits != b.fits) return a.fits;
    return a.fits ? a.plan.seconds_per_step < b.plan.seconds_per_step : limits.missing(a.plan) < limits.missing(b.plan);
  };
  std::vector<Choice> choices;
  for (const PrecisionForm& form : parts.forms) {
    choices.push_back(Comparison(parts.with(*form.backend), options).run());
    if (choices.back().fits && !chooses(options)) break;
  }
  std::stable_sort(choices.begin(), choices.end(), better);
  Choice& best = choices.front();
  if (!best.fits || choices.size() == 1) return std::move(best);
  const Choice& next = choices[1];
  const std::string otherwise =
      next.fits ? "otherwise a step takes " + format_duration(next.plan.seconds_per_step)
                : "otherwise the run does not fit: " + sized(limits.missing(next.plan)) + " are missing";
  for (const PrecisionForm& form : parts.forms)
    for (const auto& [key, value] : form.values)
      if (form.backend == best.precision)
        best.plan.decisions.push_back({key, std::string(kAuto), value, otherwise, key + "=" + value});
  return std::move(best);
}

Choice choose_with_micro_batch(const PlanParts& parts, const PlanOptions& options) {
  const std::int64_t sequences = checked_product(options.geometry.batch, options.accumulation);
  Choice best;
  int slower = 0;  // in a row
  for (std::int64_t batch = sequences; batch > 0; --batch) {
    if (sequences % batch != 0 || batch * options.geometry.sequence > kMostTokens) continue;
    PlanOptions trial = options;
    trial.geometry.batch = batch;
    trial.accumulation = sequences / batch;
    trial.uploads = uploads_for(trial.accumulation);
    Choice choice = choose(parts, trial);
    if (!choice.fits) continue;
    const bool faster = !best.fits || choice.plan.seconds_per_step < best.plan.seconds_per_step;
    slower = faster ? 0 : slower + 1;
    if (slower == 2) break;
    if (faster) best = std::move(choice);
  }
  if (!best.fits) return choose(parts, options);
  auto decide = [&](const std::string& key, std::int64_t configured, std::int64_t value) {
    const std::string text = std::to_string(value);
    best.plan.decisions.push_back(
        {key, std::to_string(configured), text, "the fastest for a step's sequences", key + "=" + text});
  };
  const int ranks = options.state.ranks;
  decide("train.micro_batch", options.geometry.batch, best.plan.options.geometry.batch);
  decide("train.accumulation", options.accumulation * ranks, best.plan.options.accumulation * ranks);
  return best;
}

}  // namespace quern
