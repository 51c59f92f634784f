#include "plan/choice/choose.h"

#include <algorithm>
#include <bit>
#include <deque>
#include <limits>
#include <map>
#include <tuple>
#include <utility>

#include "base/format.h"
#include "plan/lay_out.h"
#include "plan/schedule/make_schedules.h"
#include "plan/schedule/residency.h"
#include "quern/checked.h"

namespace quern {

namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr std::int64_t kMostTokens = std::int64_t{1} << 18;  // of a micro-batch; more makes no step faster
constexpr const PlacedKey &kMoments = kPlacedKeys[1], &kActivations = kPlacedKeys[4];
static_assert(kMoments.placement == &StatePlacement::moments);
static_assert(kActivations.placement == &StatePlacement::activations);

bool on_device(const PlanOptions& options, const PlacedKey& key) {
  return (options.state.*key.placement).memory == kOnDevice;
}

/// Whether the head's transient memory, logits for the most part, limits recomputation: the layers', which
/// changes with it, is not much more.
bool head_binds(const Plan& plan) {
  std::int64_t layers = 0;
  for (const LayerClass& layer : plan.classes)
    layers = std::max({layers, layer.forward.bytes, layer.backward.bytes, layer.evaluate.bytes});
  return std::max(plan.head_train.bytes, plan.head_evaluate.bytes) > layers / 4 * 3;
}

/// A setting of the knobs.
struct Candidate {
  const PlanParts* form = nullptr;
  PlanOptions options = {};
  unsigned away = 0;             // bit i: all of the i-th open key's state is in the first store
  Choice choice = {};            // as the options name, or once it is tried as it fits
  std::int64_t named_bytes = 0;  // of the device, with the options' own recomputation
  std::int64_t least_bytes = 0;  // of the device, whatever is recomputed and without slots; or a bound of it
  bool planned = true;           // false: there is only that bound
  double seconds = 0;            // of a step; before it is tried, at least
  bool tried = false;
};

class Search {
 public:
  Search(Trials& trials, const PlanParts& parts, const PlanOptions& options)
      : trials_(trials),
        parts_(parts),
        options_(options),
        limits_(limits_of(parts, options)),
        chooses_(chooses(options)),
        recomputes_(chooses_ && options.train) {
    if (options.train)
      for (const PrecisionForm& form : parts.forms) forms_.push_back(parts.with(*form.backend));
    if (forms_.empty()) forms_.push_back(parts);
    for (const PlacedKey& key : kPlacedKeys)
      if ((options.state.*key.placement).memory == kAuto) open_.push_back(&key);
  }

  // ---- forms of the precision backend, and whole kinds of state ----

  /// The fastest that fits and takes less than `limit` seconds; none: there is none. Without a budget it is of the
  /// first form that has one.
  std::optional<Choice> kinds(const PlanOptions& options, double limit = kNever) {
    candidates_.clear();
    std::optional<Choice> best;
    for (const PlanParts& form : forms_) {
      if (best && !chooses_) break;
      std::deque<Candidate>& candidates = candidates_.emplace_back();
      for (const unsigned away : ways()) add(candidates, form, options, away);
      std::stable_sort(candidates.begin(), candidates.end(),
                       [](const Candidate& a, const Candidate& b) { return a.seconds < b.seconds; });
      Candidate* fastest = nullptr;
      for (Candidate& candidate : candidates) {
        if (candidate.seconds >= limit) break;
        if (!candidate.tried) try_to_fit(candidate);
        if (!candidate.choice.fits || candidate.seconds >= limit) continue;
        fastest = &candidate;
        limit = candidate.seconds;
      }
      if (fastest) best = taken(candidates, *fastest);
    }
    if (best && parts_.forms.size() > 1 && options_.train) explain_form(*best);
    return best;
  }

  /// The same; where nothing fits, the choice that lacks least, with all that helps recomputed.
  Choice kinds_or_nearest(const PlanOptions& options) {
    if (std::optional<Choice> best = kinds(options)) return std::move(*best);
    std::optional<Choice> least;
    for (std::deque<Candidate>& candidates : candidates_)
      if (Choice choice = nearest(candidates); !least || limits_.missing(choice.plan) < limits_.missing(least->plan))
        least = std::move(choice);
    return std::move(*least);
  }

  // ---- shares of kinds, and other stores ----

  Choice shares(const PlanOptions& options) {
    Choice best = kinds_or_nearest(options);
    if (!best.fits) return best;
    try_shares(best);
    keep_reused(best);
    return best;
  }

  // ---- the micro-batch, and the logits made at once ----

  Choice micro_batch(const PlanOptions& options) {
    const std::int64_t sequences = checked_product(options.geometry.batch, options.accumulation);
    const bool fewer_logits = chooses_ && options.loss_chunk == 0;
    std::optional<Choice> best;
    PlanOptions trial = options, best_options;
    auto is_faster = [&] {
      std::optional<Choice> choice = kinds(trial, best ? best->plan.seconds_per_step : kNever);
      if (!choice) return false;
      best = std::move(choice);
      best_options = trial;
      return true;
    };
    int slower = 0;  // in a row
    for (std::int64_t batch = sequences; batch > 0 && slower < 2; --batch) {
      if (sequences % batch != 0 || batch * options.geometry.sequence > kMostTokens) continue;
      trial.geometry.batch = batch;
      trial.accumulation = sequences / batch;
      trial.uploads = uploads_for(trial.accumulation);
      trial.loss_chunk = options.loss_chunk;
      bool faster = is_faster();
      if (!faster && fewer_logits && head_binds(candidates_.front().front().choice.plan)) {
        trial.loss_chunk = kSmallChunk;
        faster = is_faster();
      }
      if (best) slower = faster ? 0 : slower + 1;
    }
    if (!best) return kinds_or_nearest(options);
    try_shares(*best);
    try_chunks(*best);
    if (fewer_logits && best->plan.options.loss_chunk == 0 && head_binds(best->plan)) {
      best_options.loss_chunk = kSmallChunk;
      if (std::optional<Choice> other = kinds(best_options)) {
        try_shares(*other);
        try_chunks(*other);
        if (other->plan.seconds_per_step < best->plan.seconds_per_step) best = std::move(other);
      }
    }
    keep_reused(*best);
    const PlanOptions& made = best->plan.options;
    auto decide = [&](const std::string& key, std::int64_t configured, std::int64_t value) {
      const std::string text = std::to_string(value);
      best->plan.decisions.push_back(
          {key, std::to_string(configured), text, "the fastest for a step's sequences", key + "=" + text});
    };
    if (made.loss_chunk != options.loss_chunk) decide("train.loss_chunk", options.loss_chunk, made.loss_chunk);
    decide("train.micro_batch", options.geometry.batch, made.geometry.batch);
    const int ranks = options.state.ranks;
    decide("train.accumulation", options.accumulation * ranks, made.accumulation * ranks);
    return std::move(*best);
  }

  // ---- the stage of ZeRO ----

  /// A stage that is slower before shares are tried may be the fastest with them, so that none bounds the next.
  Choice sharding() {
    using State = StatePlacement;
    constexpr Placement State::*kStages[][2] = {
        {&State::master, &State::moments}, {&State::gradients, nullptr}, {&State::weights, nullptr}};
    auto is_better = [&](const Choice& a, const Choice& b) {
      if (a.fits != b.fits) return a.fits;
      return a.fits ? a.plan.seconds_per_step < b.plan.seconds_per_step
                    : limits_.missing(a.plan) < limits_.missing(b.plan);
    };
    PlanOptions trial = options_;
    Choice best = micro_batch(trial);
    int stage = 0, fastest = 0;
    for (const auto& shards : kStages) {
      for (Placement State::*kind : shards)
        if (kind) (trial.state.*kind).sharding = Sharding::ranks;
      ++stage;
      if (!placement_faults(trial.state).empty()) break;
      Choice choice = micro_batch(trial);
      if (!is_better(choice, best)) continue;
      best = std::move(choice);
      fastest = stage;
    }
    const std::string taken = std::to_string(fastest);
    best.plan.decisions.push_back(
        {"parallel.zero", "0", taken, "the fastest stage that fits", "parallel.zero=" + taken});
    return best;
  }

 private:
  // ---- whole kinds ----

  /// Sets of open keys, from few to many.
  std::vector<unsigned> ways() const {
    std::vector<unsigned> ways(chooses_ && !options_.stores.empty() ? std::size_t{1} << open_.size() : 1);
    for (std::size_t way = 0; way < ways.size(); ++way) ways[way] = static_cast<unsigned>(way);
    std::stable_sort(ways.begin(), ways.end(), [](auto a, auto b) { return std::popcount(a) < std::popcount(b); });
    return ways;
  }

  // A candidate that fits with the options' own recomputation makes those needless that also move other state.
  void add(std::deque<Candidate>& candidates, const PlanParts& form, const PlanOptions& options, unsigned away) {
    for (const Candidate& known : candidates)
      if (known.choice.fits && (known.away & away) == known.away) return;
    Candidate candidate{.form = &form, .options = options, .away = away};
    for (std::size_t i = 0; i < open_.size(); ++i)
      (candidate.options.state.*open_[i]->placement).memory =
          away >> i & 1 ? options_.stores.front() : std::string(kOnDevice);
    if (!placement_faults(candidate.options.state).empty() && away != 0) return;
    candidate.least_bytes = least_bound(candidates, away);
    if (recomputes_ && limits_.device > 0 && candidate.least_bytes > limits_.device) {
      candidate.planned = false;
      candidate.tried = true;
    } else {
      plan(candidate);
      if (!candidate.tried && !on_device(candidate.options, kActivations))
        candidate.seconds = seconds_without(candidates, away);
    }
    candidates.push_back(std::move(candidate));
  }

  static const Candidate* find(const std::deque<Candidate>& candidates, unsigned away) {
    for (const Candidate& known : candidates)
      if (known.away == away) return &known;
    return nullptr;
  }

  /// Keys free at most what each of them frees alone. 0: nothing is known.
  std::int64_t least_bound(const std::deque<Candidate>& candidates, unsigned away) const {
    if (std::popcount(away) < 2) return 0;
    auto least_of = [&](unsigned keys) -> std::int64_t {
      const Candidate* known = find(candidates, keys);
      return known ? known->least_bytes : 0;
    };
    const std::int64_t none = least_of(0);
    std::int64_t bytes = none;
    for (std::size_t i = 0; i < open_.size(); ++i)
      if (away >> i & 1) bytes -= none - least_of(1u << i);
    return bytes;
  }

  /// Of a step whose activations stay on the device: at least what one takes that recomputes some, and moves fewer.
  double seconds_without(const std::deque<Candidate>& candidates, unsigned away) const {
    for (std::size_t i = 0; i < open_.size(); ++i)
      if (open_[i] == &kActivations) away &= ~(1u << i);
    const Candidate* known = find(candidates, away);
    return known ? known->seconds : 0;
  }

  Choice nearest(std::deque<Candidate>& candidates) {
    for (Candidate& candidate : candidates)
      if (!candidate.planned) plan(candidate);
    auto missing = [&](const Candidate& candidate) { return limits_.least_missing(candidate.choice.plan); };
    Candidate& least = *std::min_element(candidates.begin(), candidates.end(),
                                         [&](const auto& a, const auto& b) { return missing(a) < missing(b); });
    if (recomputes_) try_to_fit(least);
    if (recomputes_ && !least.choice.fits)  // with slots
      least.choice.plan =
          trials_.plan(*least.form, least.options, least.choice.recompute, [](const Plan&) { return true; });
    return std::move(least.choice);
  }

  Choice taken(const std::deque<Candidate>& candidates, Candidate& best) const {
    std::vector<Decision> decisions;
    if (recomputes_) {
      for (std::size_t i = 0; i < open_.size() && !options_.stores.empty(); ++i) {
        const std::string &memory = (best.options.state.*open_[i]->placement).memory, key = open_[i]->key;
        decisions.push_back({key, std::string(kAuto), memory, reason(candidates, best, i), key + "=" + memory});
      }
      decide_recompute(decisions, best);
    }
    best.choice.plan.decisions = std::move(decisions);
    return std::move(best.choice);
  }

  /// What it would be with this key's state at the other place.
  std::string reason(const std::deque<Candidate>& candidates, const Candidate& best, std::size_t key) const {
    const unsigned other = best.away ^ 1u << key;
    const Candidate* known = find(candidates, other);
    if (!known) return "there is room for it";
    const std::string there = other >> key & 1 ? "in `" + options_.stores.front() + "`" : "on the device";
    if (!known->tried || known->choice.fits)
      return there + (known->tried ? " a step takes " : " a step takes at least ") + format_duration(known->seconds);
    const Plan& plan = known->choice.plan;
    const std::string prefix = there + " the run does not fit: ";
    if (!known->planned || Limits{0, limits_.host, limits_.disk}.hold(plan))
      return prefix + format_bytes(known->least_bytes) + " of the device and more";
    const bool host = above(plan.host_bytes(), limits_.host) > 0;
    const std::string memory = host ? " of host memory" : " on disk";
    const std::int64_t least = least_stored_bytes(plan, host);
    return prefix + (above(least, host ? limits_.host : limits_.disk) > 0
                         ? format_bytes(least) + memory + " and more"
                         : format_bytes(host ? plan.host_bytes() : plan.disk_bytes()) + memory);
  }

  void explain_form(Choice& best) const {
    const auto is_best = [&](const PrecisionForm& form) { return form.backend == best.precision; };
    const auto taken = std::find_if(parts_.forms.begin(), parts_.forms.end(), is_best);
    if (!chooses_ && taken == parts_.forms.begin()) return;  // no other was looked at
    std::optional<double> least;
    for (const Candidate& candidate : candidates_[taken == parts_.forms.begin() ? 1 : 0])
      if (candidate.choice.fits || !candidate.tried)
        least = std::min(least.value_or(candidate.seconds), candidate.seconds);
    const std::string otherwise =
        least ? "otherwise a step takes at least " + format_duration(*least) : "otherwise the run does not fit";
    for (const auto& [key, value] : taken->values)
      best.plan.decisions.push_back({key, std::string(kAuto), value, otherwise, key + "=" + value});
  }

  // ---- one setting ----

  /// With the recomputation that the options name.
  void plan(Candidate& candidate) {
    candidate.planned = true;
    candidate.choice = trials_.named(*candidate.form, candidate.options, [&](const Plan& plan) {
      candidate.least_bytes = least_device_bytes(plan);
      return !recomputes_ || limits_.least_missing(plan) == 0;
    });
    const Plan& plan = candidate.choice.plan;
    if (plan.stores.empty()) candidate.least_bytes = least_device_bytes(plan);
    candidate.named_bytes = plan.device_total();
    candidate.tried = limits_.hold(plan) || !recomputes_ || limits_.least_missing(plan) > 0;
    settle(candidate);
  }

  void try_to_fit(Candidate& candidate) {
    candidate.choice = trials_.within(*candidate.form, candidate.options, limits_);
    candidate.tried = true;
    settle(candidate);
  }

  void settle(Candidate& candidate) {
    Plan& plan = candidate.choice.plan;
    candidate.choice.fits = limits_.hold(plan);
    if (!candidate.choice.fits && candidate.tried) return;
    add_estimates(plan, candidate.form->device);
    candidate.seconds = plan.seconds_per_step;
  }

  void decide_recompute(std::vector<Decision>& decisions, const Candidate& candidate) const {
    if (candidate.named_bytes > candidate.choice.plan.device_total())
      decisions.push_back(recompute_decision(options_, candidate.choice.recompute, candidate.named_bytes));
  }

  // ---- one knob at a time ----

  struct Tried {
    double seconds = kNever;    ///< of a step; infinite where it does not fit
    bool fills_device = false;  ///< then a larger share does not fit either
  };

  /// Takes it where that is faster.
  Tried move_to(Choice& best, const PlanOptions& options) {
    std::string places;
    for (const PlacedKey& key : kPlacedKeys) {
      const Placement& placement = options.state.*key.placement;
      places += text_of(placement) + " " + std::string(name_of(placement.sharding)) + " ";
    }
    const auto [known, is_new] =
        known_.try_emplace({best.precision, options.geometry.batch, options.loss_chunk, std::move(places)});
    Tried& tried = known->second;
    if (!is_new && tried.seconds >= best.plan.seconds_per_step) return tried;
    const PlanParts form = parts_.with(*best.precision);
    const PlanTest holds = [this](const Plan& plan) { return limits_.hold(plan); };
    Candidate candidate{.form = &form, .options = options, .choice = trials_.named(form, options, holds)};
    candidate.named_bytes = candidate.choice.plan.device_total();
    const bool recomputes_more = !holds(candidate.choice.plan);
    if (recomputes_more) candidate.choice = trials_.within(form, options, limits_);
    candidate.tried = true;
    settle(candidate);
    Plan& plan = candidate.choice.plan;
    tried = {};
    if (!candidate.choice.fits) {
      tried.fills_device = plan.ring.bytes == 0 && above(plan.device_total(), limits_.device) > 0;
      return tried;
    }
    tried.seconds = candidate.seconds;
    if (tried.seconds >= best.plan.seconds_per_step) return tried;
    plan.decisions = std::move(best.plan.decisions);
    std::erase_if(plan.decisions, [](const Decision& decision) { return decision.key == kRecomputeKey; });
    if (recomputes_more)
      plan.decisions.push_back(recompute_decision(options_, candidate.choice.recompute, candidate.named_bytes));
    best = std::move(candidate.choice);
    return tried;
  }

  // Room for activations may be worth more than some moments' transfers, once a step: where activations are recomputed
  // or moved, another search begins with moments.
  void try_shares(Choice& best) {
    if (!recomputes_ || options_.stores.empty() || open_.empty()) return;
    const std::vector<Decision>& decisions = best.plan.decisions;
    const bool recomputes_more =
        std::any_of(decisions.begin(), decisions.end(), [](const auto& d) { return d.key == kRecomputeKey; });
    std::optional<Choice> other;
    if (std::find(open_.begin(), open_.end(), &kMoments) != open_.end() && on_device(best.plan.options, kMoments) &&
        (recomputes_more || !on_device(best.plan.options, kActivations))) {
      share(other.emplace(best), kMoments);
      share_all(*other, &kMoments);
    }
    share_all(best, nullptr);
    if (other && other->plan.seconds_per_step < best.plan.seconds_per_step) best = std::move(*other);
  }

  void share_all(Choice& best, const PlacedKey* done) {
    for (auto key = open_.rbegin(); key != open_.rend(); ++key)
      if (*key != done && (*key == &kActivations || !on_device(best.plan.options, **key))) share(best, **key);
  }

  /// Percents that are far apart, then those beside the fastest of them. State that is used once a step may be in any
  /// store, also in one where kernels read and write it in place.
  void share(Choice& best, const PlacedKey& key) {
    const std::string whole = text_of(best.plan.options.state.*key.placement);
    const double seconds = best.plan.seconds_per_step;
    for (const std::string& store : options_.stores) {
      for (const std::int64_t percent : {0, 20, 40, 60, 80})
        if (try_percent(best, key, store, percent).fills_device) break;
      if (key.placement != &StatePlacement::master && key.placement != &StatePlacement::moments) break;
    }
    for (const std::int64_t apart : {10, 5}) {
      const Placement middle = best.plan.options.state.*key.placement;
      if (text_of(middle) == whole) return;
      for (const std::int64_t percent : {-apart, apart})
        try_percent(best, key, middle.memory, middle.device_percent + percent);
    }
    const std::string value = text_of(best.plan.options.state.*key.placement);
    for (Decision& decision : best.plan.decisions)
      if (decision.key == key.key) {
        decision.value = value;
        decision.assignment = std::string(key.key) + "=" + value;
        decision.reason = "all of it " + (whole == kOnDevice ? "on the device" : "in `" + whole + "`") +
                          " a step takes " + format_duration(seconds);
      }
  }

  Tried try_percent(Choice& best, const PlacedKey& key, const std::string& store, std::int64_t percent) {
    if (percent < 0 || percent > 99) return {};
    if (percent == 0 && store == options_.stores.front()) return {};  // it was compared
    PlanOptions trial = best.plan.options;
    Placement& placement = trial.state.*key.placement;
    placement.memory = store;
    placement.device_percent = percent;
    return placement_faults(trial.state).empty() ? move_to(best, trial) : Tried{};
  }

  void try_chunks(Choice& best) {
    if (!recomputes_ || options_.loss_chunk != 0) return;
    for (const std::int64_t chunk : {4096, 2048, 1024, 512}) {
      PlanOptions trial = best.plan.options;
      trial.loss_chunk = chunk;
      if (chunk < trial.geometry.tokens()) move_to(best, trial);
    }
  }

  void keep_reused(Choice& best) const {
    Plan& plan = best.plan;
    const std::int64_t room = limits_.device - plan.device_total();
    if (!chooses_ || plan.ring.bytes == 0 || plan.options.kept_bytes > 0 || room <= 0) return;
    const std::int64_t bytes = std::min(room / plan.alignment * plan.alignment,
                                        reused_bytes(make_schedules(plan), plan.alignment, plan.ring.spare));
    if (bytes == 0) return;
    plan.options.kept_bytes = bytes;
    lay_out_kept(plan);
    add_estimates(plan, parts_.device);
  }

  Trials& trials_;
  const PlanParts& parts_;
  const PlanOptions& options_;
  const Limits limits_;
  const bool chooses_;
  const bool recomputes_;                         ///< more than the options name, if need be
  std::deque<PlanParts> forms_;                   ///< of the precision backend
  std::vector<const PlacedKey*> open_;            ///< keys that are left to the planner
  std::deque<std::deque<Candidate>> candidates_;  ///< whole kinds, by form, of the options that were compared last
  std::map<std::tuple<const PrecisionBackend*, std::int64_t, std::int64_t, std::string>, Tried> known_;
};

}  // namespace

std::optional<Choice> choose_fitting(const PlanParts& parts, const PlanOptions& options) {
  Trials trials;
  return Search(trials, parts, options).kinds(options);
}

Choice choose(Trials& trials, const PlanParts& parts, const PlanOptions& options, Reach reach) {
  Search search(trials, parts, options);
  if (reach == Reach::kinds) return search.kinds_or_nearest(options);
  if (reach == Reach::shares) return search.shares(options);
  return reach == Reach::micro_batch ? search.micro_batch(options) : search.sharding();
}

Choice choose(const PlanParts& parts, const PlanOptions& options, Reach reach) {
  Trials trials;
  return choose(trials, parts, options, reach);
}

Choice choose_for_all_ranks(Trials& trials, const PlanParts& parts, PlanOptions options) {
  options.state.rank = 0;
  return choose(trials, parts, options, Reach::shares);
}

}  // namespace quern
