// The planner's choice: within the budgets to the byte, as fast as the best of all placements that fit, and repeatable
// by the keys that it names.
#include "plan/choice/choose.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <set>
#include <utility>

#include <doctest/doctest.h>

#include "plan/test_plans.h"
#include "quern/error.h"
#include "quern/testkit/refusal.h"

using namespace quern;

namespace {

const testkit::TinyModelOptions kDeep{.layers = 12};

/// Of a model whose layers take more than the slots for one of them.
Plan deep_plan(const PlanOptions& options, const Device& device = PlanningDevice()) {
  return tiny_plan(options, device, testkit::PlainPrecision(DType::bf16), kDeep);
}

/// What the plan is made of. `choose` does not verify it, which takes most of a test's time.
struct DeepParts {
  explicit DeepParts(PlanningDevice::Support support = {}) : device(std::move(support)) {}
  const testkit::TinyModel model{kDeep};
  const testkit::PlainPrecision precision{DType::bf16};
  PlanningDevice device;
  const AdamW optimizer{AdamWOptions{}};
  const std::vector<OpSpec> custom;
  PlanParts parts{model, precision, device, optimizer, custom};
};

/// Everything is left to the planner.
PlanOptions open_options() {
  PlanOptions options = tiny_options();
  options.stores = {"host"};
  options.accumulation = 4;
  for (const PlacedKey& key : kPlacedKeys) (options.state.*key.placement).memory = kAuto;
  return options;
}

PlanOptions with_budgets(PlanOptions options, std::int64_t device, std::int64_t host) {
  options.device_budget = device;
  options.host_budget = host;
  return options;
}

Choice choose(const PlanParts& parts, const PlanOptions& options) { return choose(parts, options, Reach::kinds); }

Choice with_shares(const PlanParts& parts, const PlanOptions& options) { return choose(parts, options, Reach::shares); }

/// The fastest step of all placements, each named in the options.
std::optional<double> fastest(const PlanParts& parts, const PlanOptions& options) {
  std::optional<double> best;
  for (unsigned places = 0; places < 32; ++places) {
    PlanOptions named = stored_options(places, 1);
    named.stores = options.stores;
    named.accumulation = options.accumulation;
    const Choice choice = choose(parts, with_budgets(named, options.device_budget, options.host_budget));
    if (choice.fits) best = std::min(best.value_or(choice.plan.seconds_per_step), choice.plan.seconds_per_step);
  }
  return best;
}

}  // namespace

TEST_CASE("without a budget all state is on the device") {
  const Plan plan = deep_plan(open_options()), resident = deep_plan(tiny_options());
  CHECK(plan.device_bytes == resident.device_bytes);
  CHECK(plan.stores.empty());
  CHECK(plan.decisions.empty());
  for (const PlacedKey& key : kPlacedKeys) CHECK((plan.options.state.*key.placement).memory == kOnDevice);
}

TEST_CASE("a choice stays within its budgets and is the fastest of all that do") {
  const DeepParts deep;
  const std::int64_t resident = choose(deep.parts, tiny_options()).plan.device_bytes;
  double before = INFINITY;
  int away = 0, refused = 0;
  for (const int part : {4, 8, 11, 14, 16})
    for (const std::int64_t host : {std::int64_t{0}, resident / 2}) {
      CAPTURE(part);
      CAPTURE(host);
      const PlanOptions options = with_budgets(open_options(), resident * part / 16, host);
      const std::optional<double> want = fastest(deep.parts, options);
      const Choice choice = choose(deep.parts, options);
      const Plan& plan = choice.plan;
      REQUIRE(choice.fits == want.has_value());
      refused += choice.fits ? 0 : 1;
      if (!choice.fits) continue;
      CHECK(plan.device_bytes <= options.device_budget);
      if (host > 0) CHECK(plan.host_bytes() <= host);
      CHECK(plan.seconds_per_step == doctest::Approx(*want).epsilon(1e-9));
      away += plan.stores.empty() ? 0 : 1;
      if (host > 0) continue;
      CHECK(plan.seconds_per_step <= before);  // more memory is never slower
      before = plan.seconds_per_step;
      const PlanOptions exact = with_budgets(options, plan.device_bytes, plan.host_bytes());
      CHECK(choose(deep.parts, exact).plan.seconds_per_step == plan.seconds_per_step);
    }
  CHECK(away > 2);
  CHECK(refused > 0);
}

TEST_CASE("each key that was left open has a line, and its assignments make the same plan") {
  PlanOptions options = with_budgets(open_options(), deep_plan(tiny_options()).device_bytes / 2, 0);
  options.state.gradients.memory = kOnDevice;
  const Plan plan = deep_plan(options);
  CHECK(plan.options.state.gradients.memory == kOnDevice);
  std::size_t placed = 0;
  PlanOptions named = options;
  for (const Decision& decision : plan.decisions) {
    CHECK(!decision.reason.empty());
    for (const PlacedKey& key : kPlacedKeys) {
      if (key.key != decision.key) continue;
      ++placed;
      CHECK(decision.configured == "auto");
      CHECK(decision.assignment == decision.key + "=" + decision.value);
      named.state.*key.placement = placement_named(decision.value).value();
    }
  }
  CHECK(placed == 4);
  const Plan again = deep_plan(named);
  CHECK(again.device_bytes == plan.device_bytes);
  CHECK(again.seconds_per_step == plan.seconds_per_step);
}

TEST_CASE("shares of the layers on the device are within the budget, make no step slower and some faster") {
  const DeepParts deep;
  const std::int64_t resident = choose(deep.parts, tiny_options()).plan.device_bytes;
  int faster = 0;
  for (const int part : {6, 8, 10, 12, 14}) {
    CAPTURE(part);
    const PlanOptions options = with_budgets(open_options(), resident * part / 16, 0);
    const Choice whole = choose(deep.parts, options), shared = with_shares(deep.parts, options);
    REQUIRE(shared.fits == whole.fits);
    if (!whole.fits) continue;
    CHECK(shared.plan.device_bytes <= options.device_budget);
    CHECK(shared.plan.seconds_per_step <= whole.plan.seconds_per_step);
    int shares = 0;
    for (const PlacedKey& key : kPlacedKeys) {
      const Placement& placement = shared.plan.options.state.*key.placement;
      if (placement.device_percent == 0) continue;
      ++shares;
      for (const Decision& decision : shared.plan.decisions)
        if (decision.key == key.key) CHECK(decision.value == text_of(placement));
    }
    CHECK((shares > 0) == (shared.plan.seconds_per_step < whole.plan.seconds_per_step));
    faster += shares > 0 ? 1 : 0;
  }
  CHECK(faster > 1);
}

TEST_CASE("in steps of many micro-batches moments may be in a store where kernels work in place, in part") {
  DeepParts deep;
  deep.parts.stores = {{.id = "host"}, {.id = "zerocopy", .mappable = true}};
  const std::int64_t resident = choose(deep.parts, tiny_options()).plan.device_bytes;
  PlanOptions options = with_budgets(open_options(), resident * 24 / 64, 0);
  options.accumulation = 64;
  const Choice of_one = with_shares(deep.parts, options);
  options.stores = {"host", "zerocopy"};
  const Choice of_both = with_shares(deep.parts, options);
  REQUIRE(of_both.fits);
  CHECK(of_both.plan.device_bytes <= options.device_budget);
  CHECK(of_both.plan.seconds_per_step < of_one.plan.seconds_per_step);
  const StatePlacement& state = of_both.plan.options.state;
  CHECK(text_of(state.moments) == "device:20%,zerocopy");
  for (const Placement* placement : {&state.gradients, &state.weights, &state.activations})
    CHECK(placement->memory != "zerocopy");
}

TEST_CASE("the chosen shares give the same plan when they are named, also beside the config's own recomputation") {
  DeepParts deep;
  deep.parts.stores = {{.id = "host"}, {.id = "zerocopy", .mappable = true}};
  const std::int64_t resident = choose(deep.parts, tiny_options()).plan.device_bytes;
  for (const std::vector<std::string>& own : {std::vector<std::string>{}, {"swiglu"}, {"swiglu", "norm"}, {"block"}}) {
    for (const int part : {18, 28, 34, 40, 48, 56}) {
      CAPTURE(own.size());
      CAPTURE(part);
      PlanOptions options = with_budgets(open_options(), resident * part / 64, 0);
      options.accumulation = 64;
      options.recompute = own;
      options.stores = {"host", "zerocopy"};
      const Choice chosen = with_shares(deep.parts, options);
      if (!chosen.fits) continue;
      PlanOptions named = options;
      for (const PlacedKey& key : kPlacedKeys) named.state.*key.placement = chosen.plan.options.state.*key.placement;
      const Choice again = with_shares(deep.parts, named);
      CHECK(again.plan.seconds_per_step == chosen.plan.seconds_per_step);
      CHECK(again.plan.device_bytes == chosen.plan.device_bytes);
      auto reason = [](const Plan& plan) {
        std::string text;
        for (const Decision& decision : plan.decisions)
          if (decision.key == kRecomputeKey) text += decision.value + decision.reason;
        return text;
      };
      CHECK(reason(again.plan) == reason(chosen.plan));
    }
  }
}

TEST_CASE("a budget holds what the device and communicators take beside the arena") {
  DeepParts alone, beside;
  beside.device.device_traits.own_bytes = 1000;
  beside.parts.communicator_bytes = 500;
  const std::int64_t resident = choose(alone.parts, tiny_options()).plan.device_bytes, budget = resident * 11 / 16;
  const Plan want = choose(alone.parts, with_budgets(open_options(), budget, 0)).plan,
             plan = choose(beside.parts, with_budgets(open_options(), budget + 1500, 0)).plan;
  CHECK(plan.device_bytes == want.device_bytes);
  CHECK(plan.device_total() == want.device_total() + 1500);
  std::int64_t owned = 0;
  for (const OwnerBytes& owner : plan.owners)
    owned += owner.memory == MemoryKind::device && owner.store < 0 ? owner.bytes : 0;
  CHECK(owned == plan.device_total());
  CHECK_FALSE(choose(beside.parts, with_budgets(tiny_options(), 1400, 0)).fits);

  // The arena's memory is given without what the device takes, and a communicator's is part of it.
  beside.device.device_traits.memory_bytes = static_cast<std::size_t>(resident + 500);
  CHECK(choose(beside.parts, tiny_options()).fits);
  beside.device.device_traits.memory_bytes -= 1;
  CHECK_FALSE(choose(beside.parts, tiny_options()).fits);
}

TEST_CASE("what fits nowhere is refused with what takes the memory and with changes that help") {
  const std::int64_t resident = deep_plan(tiny_options()).device_bytes;
  const std::string device =
      testkit::refusal(ErrorCode::resources, [&] { deep_plan(with_budgets(open_options(), resident / 8, 0)); });
  CHECK(device.starts_with("memory.device_budget: the run does not fit: found "));
  CHECK(device.find("memory.device_budget = \"") != std::string::npos);
  const std::string host =
      testkit::refusal(ErrorCode::resources, [&] { deep_plan(with_budgets(open_options(), resident, 500)); });
  CHECK(host.find(" of host memory needed, of which ") != std::string::npos);
  CHECK(host.find("memory.host_budget = \"") != std::string::npos);

  PlanningDevice small;
  small.device_traits.memory_bytes = static_cast<std::size_t>(resident * 3 / 4);
  testkit::check_refused(ErrorCode::resources,
                         {"device planning: the run does not fit", "with which the planner chooses"},
                         [&] { deep_plan(open_options(), small); });
}

TEST_CASE("a disk's budget and capacity limit what stores keep that are not in host memory") {
  DeepParts deep;
  deep.parts.stores = {{.id = "disk", .put_rate = 1e9, .get_rate = 1e9}};
  PlanOptions options = open_options();
  options.stores = {"disk"};
  options.device_budget = deep_plan(tiny_options()).device_bytes / 2;
  const Choice free = choose(deep.parts, options);
  REQUIRE(free.fits);
  const std::int64_t wanted = free.plan.disk_bytes();
  REQUIRE(wanted > 0);
  CHECK(free.plan.host_bytes() == free.plan.pinned_bytes + free.plan.snapshot_bytes);
  options.disk_budget = wanted;
  CHECK(choose(deep.parts, options).plan.disk_bytes() == wanted);
  options.disk_budget = wanted - 1;
  const Choice less = choose(deep.parts, options);
  CHECK((!less.fits || less.plan.disk_bytes() < wanted));
  options.disk_budget = 0;
  deep.parts.stores[0].capacity = static_cast<std::size_t>(wanted - 1);
  const Choice full = choose(deep.parts, options);
  CHECK(full.fits == less.fits);
  CHECK(full.plan.disk_bytes() == less.plan.disk_bytes());

  options.state.moments.memory = "disk";
  options.device_budget = 0;
  options.disk_budget = 500;
  deep.parts.stores[0].capacity = 0;
  const std::string refusal = testkit::refusal(ErrorCode::resources, [&] { make_plan(deep.parts, options); });
  CHECK(refusal.starts_with("memory.disk_budget: the run does not fit: found "));
  CHECK(refusal.find(" on disk needed, of which ") != std::string::npos);
  CHECK(refusal.find("memory.disk_budget = \"") != std::string::npos);
  options.disk_budget = 0;
  deep.parts.stores[0].capacity = 500;
  CHECK(testkit::refusal(ErrorCode::resources, [&] {
          make_plan(deep.parts, options);
        }).starts_with("store disk: the run does not fit: found "));
}

TEST_CASE("a slow disk is not chosen where recomputation is faster") {
  DeepParts deep;
  PlanOptions options = open_options();
  options.stores = {"disk"};
  options.device_budget = deep_plan(tiny_options()).device_bytes / 2;
  auto seconds = [&](double rate) {
    deep.parts.stores = {{.id = "disk", .put_rate = rate, .get_rate = rate}};
    const Choice choice = choose(deep.parts, options);
    REQUIRE(choice.fits);
    return choice.plan.seconds_per_step;
  };
  CHECK(seconds(1e3) > 2 * seconds(0));
  CHECK(seconds(1e15) == seconds(0));
}

TEST_CASE("a refusal has its reason also where a kernel lacks the form that an advice needs") {
  const std::int64_t resident = deep_plan(tiny_options()).device_bytes;
  PlanningDevice device([](const OpInstance& op) {
    const bool bf16 = std::any_of(op.inputs.begin(), op.inputs.end(),
                                  [](const Operand& operand) { return operand.dtype == DType::bf16; });
    return OpSupport{op.kind == "adamw" && bf16 ? "no bf16 gradients or masters" : "", 0};
  });
  device.device_traits.memory_bytes = static_cast<std::size_t>(resident * 3 / 4);
  testkit::check_refused(ErrorCode::resources, {"the run does not fit", "with which the planner chooses"},
                         [&] { deep_plan(open_options(), device); });
}

TEST_CASE("where the state alone is too large, no change that leaves most of it is planned") {
  std::size_t queries = 0;
  PlanningDevice device([&](const OpInstance&) {
    ++queries;
    return OpSupport{};
  });
  PlanOptions options = tiny_options();
  options.stores = {"host"};
  options.geometry.batch = 1 << 10;
  device.device_traits.memory_bytes = 0;
  deep_plan(options, device);
  const std::size_t one_plan = std::exchange(queries, 0);
  device.device_traits.memory_bytes = 4096;
  testkit::check_refused(ErrorCode::resources, {"the run does not fit"}, [&] { deep_plan(options, device); });
  CAPTURE(one_plan);
  CHECK(queries < 3 * one_plan);  // it and what lets the planner choose
}

TEST_CASE("the micro-batch is the fastest for the sequences of a step") {
  const DeepParts deep;
  const std::int64_t resident = choose(deep.parts, tiny_options()).plan.device_bytes;
  for (const int part : {7, 40}) {
    const PlanOptions options = with_budgets(open_options(), resident * part / 10, 0);
    const Choice choice = choose(deep.parts, options, Reach::micro_batch);
    REQUIRE(choice.fits);
    const PlanOptions& made = choice.plan.options;
    CHECK(made.geometry.batch * made.accumulation == options.geometry.batch * options.accumulation);
    CHECK(choice.plan.device_bytes <= options.device_budget);
    for (const std::int64_t batch : {1, 2, 4, 8}) {
      PlanOptions other = options;
      other.geometry.batch = batch;
      other.accumulation = 8 / batch;
      other.uploads = uploads_for(other.accumulation);
      const Choice there = choose(deep.parts, other);
      if (there.fits) CHECK(choice.plan.seconds_per_step <= there.plan.seconds_per_step);
    }
    CHECK(choice.plan.decisions.back().assignment == "train.accumulation=" + std::to_string(made.accumulation));
  }
}

TEST_CASE(
    "of several ranks' sharding it takes the fastest stage that fits, and one that shards more where less does not") {
  const DeepParts deep;
  PlanOptions options = tiny_options();
  options.geometry = {1, 4};  // state takes most of the memory
  options.accumulation = 1;
  options.state.ranks = 2;
  options.state.meet = true;
  auto stage_of = [](const PlanOptions& made) {
    const StatePlacement& state = made.state;
    int stage = 0;
    for (const Placement* placement : {&state.master, &state.gradients, &state.weights})
      stage += placement->sharding == Sharding::ranks;
    return stage;
  };
  auto at_stage = [&](int stage) {
    PlanOptions named = options;
    const Sharding of[] = {Sharding::none, Sharding::ranks};
    named.state.master.sharding = named.state.moments.sharding = of[stage > 0];
    named.state.gradients.sharding = of[stage > 1];
    named.state.weights.sharding = of[stage > 2];
    return choose(deep.parts, named, Reach::micro_batch);
  };
  std::vector<std::int64_t> bytes;
  std::vector<double> seconds;
  for (int stage = 0; stage < 4; ++stage) {
    const Choice choice = at_stage(stage);
    bytes.push_back(choice.plan.device_bytes);
    seconds.push_back(choice.plan.seconds_per_step);
  }
  for (std::size_t stage = 1; stage < 4; ++stage) CHECK(bytes[stage] < bytes[stage - 1]);
  const Choice free = choose(deep.parts, options, Reach::sharding);
  CHECK(free.plan.seconds_per_step == *std::min_element(seconds.begin(), seconds.end()));
  for (const int least : {1, 3}) {
    CAPTURE(least);
    const Choice tight =
        choose(deep.parts, with_budgets(options, bytes[static_cast<std::size_t>(least)], 0), Reach::sharding);
    REQUIRE(tight.fits);
    CHECK(tight.plan.device_total() <= bytes[static_cast<std::size_t>(least)]);
    const int stage = stage_of(tight.plan.options);
    CHECK(stage > 0);
    CHECK(tight.plan.decisions.back().assignment == "parallel.zero=" + std::to_string(stage));
    CHECK(tight.plan.seconds_per_step >= free.plan.seconds_per_step);
  }
}

namespace {

/// Input gradients read a transposed copy of the weight, kept or made in each backward pass.
class Transposing final : public testkit::PlainPrecision {
 public:
  explicit Transposing(bool kept) : PlainPrecision(DType::bf16), kept_(kept) {}
  void lower(const ProductSite& site, Lowering& lowering) const override {
    if (site.product != Product::input_gradient) return lower_to_matmul(site, lowering);
    const ValueId turned = kept_ ? lowering.working_copy(site.parameter, "transpose", {})[0]
                                 : lowering.emit("transpose", {site.weight}, {}, std::string(site.parameter) + ".t")[0];
    lowering.produce("matmul", {site.dy, turned}, {{"transpose_a", std::int64_t{0}}, {"transpose_b", std::int64_t{1}}});
  }

 private:
  bool kept_;
};

}  // namespace

TEST_CASE("of the precision's forms it takes the first that fits, and within a budget the fastest") {
  DeepParts deep([](const OpInstance& op) {  // its input gradients need the copy
    const bool as_stored =
        op.kind == "matmul" && op.attributes.integer("transpose_a") == 0 && op.attributes.integer("transpose_b") == 0;
    return OpSupport{as_stored ? "only a b^T" : "", 0};
  });
  const Transposing kept(true), made(false);
  deep.parts.forms = {{{{"precision.test.copies", "kept"}}, &kept}, {{{"precision.test.copies", "made"}}, &made}};
  auto with = [&](const PrecisionBackend& backend, const PlanOptions& options) {
    return choose(deep.parts.with(backend), options);
  };
  const std::int64_t resident = with(kept, tiny_options()).plan.device_bytes;
  CHECK(choose(deep.parts, tiny_options()).precision == &kept);
  deep.device.device_traits.memory_bytes = static_cast<std::size_t>(resident - 1);
  const Choice second = choose(deep.parts, tiny_options());
  CHECK(second.precision == &made);
  REQUIRE(second.plan.decisions.size() == 1);
  CHECK(second.plan.decisions[0].reason == "otherwise the run does not fit");
  deep.device.device_traits.memory_bytes = 0;

  std::set<const PrecisionBackend*> taken;
  for (const int part : {1, 6, 9, 12, 20}) {
    CAPTURE(part);
    const PlanOptions options = with_budgets(open_options(), resident * part / 16, 0);
    const Choice choice = choose(deep.parts, options), one = with(kept, options), other = with(made, options);
    CHECK(choice.fits == (one.fits || other.fits));
    if (!choice.fits) continue;
    const double least =
        std::min(one.fits ? one.plan.seconds_per_step : INFINITY, other.fits ? other.plan.seconds_per_step : INFINITY);
    CHECK(choice.plan.seconds_per_step == least);
    const Decision& decision = choice.plan.decisions.back();
    CHECK(decision.assignment == std::string("precision.test.copies=") + (choice.precision == &kept ? "kept" : "made"));
    CHECK(with(*choice.precision, options).plan.device_bytes == choice.plan.device_bytes);
    taken.insert(choice.precision);
  }
  CHECK(taken.size() == 2);
}

TEST_CASE("ranks choose alike, though each would find other times for its own shards") {
  // Updates of some numbers of rows are much slower than of others.
  DeepParts deep([](const OpInstance& op) {
    return op.kind == "adamw" ? OpSupport{.seconds = 1e-3 * static_cast<double>(op.inputs[0].count() % 7)}
                              : OpSupport{};
  });
  deep.device.device_traits.alignment = 16;  // so that the model's matrices can be split
  deep.parts.stores = {{.id = "host"}};
  PlanOptions sharded = open_options();
  sharded.state.ranks = 3;
  sharded.state.meet = true;
  for (Placement* placement : {&sharded.state.master, &sharded.state.moments, &sharded.state.weights})
    placement->sharding = Sharding::ranks;
  sharded.accumulation = 4;
  sharded.stores = {"host"};
  const std::int64_t resident = choose(deep.parts, tiny_options()).plan.device_bytes;
  int budgets = 0;
  for (int part = 16; part < 64; part += 6) {
    CAPTURE(part);
    PlanOptions options = with_budgets(sharded, resident * part / 64, 0);
    if (!with_shares(deep.parts, options).fits) continue;
    ++budgets;
    auto decided = [&](int rank) {
      options.state.rank = rank;
      const Plan plan = make_plan(deep.parts, options);
      std::string text = std::to_string(plan.options.kept_bytes);
      for (const Decision& decision : plan.decisions) text += " " + decision.assignment + decision.value;
      return text;
    };
    CHECK(decided(1) == decided(0));
    CHECK(decided(2) == decided(0));
  }
  CHECK(budgets > 4);
}
