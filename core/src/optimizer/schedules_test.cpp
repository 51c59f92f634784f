// Properties that hold for every schedule, over many lengths of run and warm-up, and the formulas at stated points.
#include "optimizer/schedules.h"

#include <cmath>

#include <doctest/doctest.h>

using namespace quern;

namespace {

std::unique_ptr<Schedule> make(const std::string& id, const OptionValues& values) {
  for (const Factory& factory : schedule_factories())
    if (factory.id == id) return std::unique_ptr<Schedule>(static_cast<Schedule*>(factory.create(values)));
  FAIL("no schedule " << id);
  return nullptr;
}

OptionValues options(std::int64_t warmup, double final_fraction, std::int64_t cooldown = 0) {
  OptionValues values;
  values.set("warmup", warmup);
  values.set("final", final_fraction);
  values.set("cooldown", cooldown);
  return values;
}

const std::int64_t kLengths[] = {1, 2, 3, 7, 100, 1001};
const std::int64_t kWarmups[] = {0, 1, 2, 6, 99, 100, 5000};
const double kFinals[] = {0.0, 0.1, 1.0};

}  // namespace

TEST_CASE("the last of several steps gets the final fraction exactly, whatever the warm-up and cool-down") {
  for (const char* id : {"cosine", "linear", "wsd"})
    for (std::int64_t steps : kLengths)
      for (std::int64_t warmup : kWarmups)
        if (steps > 1)
          for (double final_fraction : kFinals)
            for (std::int64_t cooldown : {0, 1, 5, 100000})
              CHECK(make(id, options(warmup, final_fraction, cooldown))->factor(steps - 1, steps) == final_fraction);
}

TEST_CASE("every factor is a number from 0 to 1, above 0 before the last step") {
  for (const char* id : {"constant", "cosine", "linear", "wsd"})
    for (std::int64_t steps : kLengths)
      for (std::int64_t warmup : kWarmups)
        for (double final_fraction : kFinals) {
          auto schedule = make(id, options(warmup, final_fraction));
          for (std::int64_t step = 0; step < steps; ++step) {
            double factor = schedule->factor(step, steps);
            bool good = std::isfinite(factor) && factor <= 1 && (step == steps - 1 ? factor >= 0 : factor > 0);
            if (!good)
              FAIL_CHECK(id << " steps " << steps << " warmup " << warmup << " final " << final_fraction << " step "
                            << step << ": " << factor);
          }
        }
}

TEST_CASE("factors rise up to the warm-up's end, reach 1 there, and never rise again") {
  for (const char* id : {"constant", "cosine", "linear", "wsd"})
    for (std::int64_t steps : {100, 1001})
      for (std::int64_t warmup : {0, 1, 2, 6, 50}) {
        INFO(id << ", steps " << steps << ", warmup " << warmup);
        auto schedule = make(id, options(warmup, 0.1));
        CHECK(schedule->factor(warmup, steps) == 1.0);
        bool ordered = true;
        for (std::int64_t step = 1; step < steps; ++step) {
          double before = schedule->factor(step - 1, steps), now = schedule->factor(step, steps);
          ordered = ordered && (step < warmup ? now > before : step == warmup ? now >= before : now <= before);
        }
        CHECK(ordered);
        for (std::int64_t step = 0; step < warmup; ++step)
          CHECK(schedule->factor(step, steps) ==
                doctest::Approx(static_cast<double>(step + 1) / static_cast<double>(warmup)));
      }
}

TEST_CASE("a warm-up that is longer than the run rises evenly to the peak, which is the last step but one") {
  const double want[] = {0.25, 0.5, 0.75, 1.0};
  for (std::int64_t warmup : {4, 5, 9, 100000})
    for (const char* id : {"constant", "cosine", "linear", "wsd"}) {
      INFO(id << ", warmup " << warmup);
      auto schedule = make(id, options(warmup, 0.1));
      for (std::int64_t step = 0; step < 4; ++step) CHECK(schedule->factor(step, 5) == want[step]);
      CHECK(schedule->factor(4, 5) == (std::string(id) == "constant" ? 1.0 : 0.1));
    }
}

TEST_CASE("a run of one step is at the peak") {
  for (std::int64_t warmup : kWarmups)
    for (const char* id : {"constant", "cosine", "linear", "wsd"})
      CHECK(make(id, options(warmup, 0.1))->factor(0, 1) == 1.0);
}

TEST_CASE("cosine and linear are halfway down in the middle, linear falls by equal parts") {
  CHECK(make("cosine", options(10, 0.2))->factor(60, 111) == doctest::Approx(0.6));
  CHECK(make("cosine", options(10, 0.0))->factor(35, 111) ==
        doctest::Approx(0.5 + std::sqrt(2.0) / 4));  // a quarter of the way
  auto linear = make("linear", options(10, 0.2));
  CHECK(linear->factor(60, 111) == doctest::Approx(0.6));
  for (std::int64_t step = 11; step < 111; ++step)
    CHECK(linear->factor(step - 1, 111) - linear->factor(step, 111) == doctest::Approx(0.008).epsilon(1e-9));
}

TEST_CASE("wsd stays at the peak, then cools down over the steps or the fraction asked for") {
  auto by_steps = make("wsd", options(10, 0.1, 16));
  CHECK(by_steps->factor(100 - 17, 100) == 1.0);
  CHECK(by_steps->factor(100 - 16, 100) == doctest::Approx(0.1 + 0.9 * 0.75));  // 1 - sqrt(1 / 16)
  CHECK(by_steps->factor(100 - 13, 100) == doctest::Approx(0.1 + 0.9 * 0.5));
  OptionValues fraction = options(10, 0.1);
  fraction.set("cooldown_fraction", 0.16);
  for (std::int64_t step = 0; step < 100; ++step)
    CHECK(make("wsd", fraction)->factor(step, 100) == by_steps->factor(step, 100));
  fraction.set("cooldown_fraction", 0.0);  // only the last step
  CHECK(make("wsd", fraction)->factor(98, 100) == 1.0);
  CHECK(make("wsd", fraction)->factor(99, 100) == 0.1);
}

TEST_CASE("options have sound defaults, and a constant rate has no final one") {
  for (const Factory& factory : schedule_factories()) {
    CAPTURE(factory.id);
    CHECK(factory.kind == "schedule");
    bool has_final = false;
    for (const OptionSpec& spec : factory.options) {
      OptionValue value = spec.default_value;
      CHECK(!check_option(spec, value));
      has_final = has_final || spec.key == "final";
      OptionValue negative = spec.type == OptionType::integer ? OptionValue(std::int64_t{-1}) : OptionValue(-0.1);
      CHECK(check_option(spec, negative));
    }
    CHECK(has_final == (factory.id != "constant"));
  }
}
