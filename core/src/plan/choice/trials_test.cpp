// What a search keeps between its trials changes none of them.
#include "plan/choice/trials.h"

#include <doctest/doctest.h>

#include "plan/laws/check_schedules.h"
#include "plan/test_plans.h"

using namespace quern;

TEST_CASE("what fits is the same whatever a search has planned before, in how many layers less is recomputed too") {
  const testkit::TinyModel model({.layers = 12});
  const testkit::PlainPrecision precision(DType::bf16);
  const PlanningDevice device;
  const AdamW optimizer{AdamWOptions{}};
  const std::vector<OpSpec> custom;
  const PlanParts parts{model, precision, device, optimizer, custom};
  for (const unsigned places : {0U, 2U, 26U}) {  // 26: moments, compute weights and activations are stored
    CAPTURE(places);
    const PlanOptions options = stored_options(places, 1);
    Trials trials;
    const std::int64_t named = trials.named(parts, options, [](const Plan&) { return true; }).plan.device_total();
    std::set<std::int64_t> richer;
    for (std::int64_t part = 40; part > 16; --part) {
      const Limits limits{.device = named * part / 40};
      const Choice found = trials.within(parts, options, limits), alone = Trials().within(parts, options, limits);
      CHECK(found.recompute == alone.recompute);
      CHECK(shared_text(found.plan) == shared_text(alone.plan));
      if (limits.hold(found.plan)) richer.insert(found.recompute.richer_layers);
    }
    if (places < 26) CHECK(richer.size() > 3);
  }
}
