// Optimizers, schedules and log sinks with one fault each.
#include "checked.h"

#include <doctest/doctest.h>

using namespace quern;
using namespace quern::conformance;

TEST_CASE("an update op that looks at more than it states") {
  for (const char* locality : {"element", "row"}) {
    const Report report = checked_with("optimizer", "ratio", {"locality=" + std::string(locality)});
    const std::string text = report.text();
    CAPTURE(text);
    CHECK(report.count(Verdict::broken) == 1);
    CHECK(text.find("op ratio_update_" + std::string(locality) + ", which states locality " + locality) !=
          std::string::npos);
    CHECK(text.find("after a change of gradient's element") != std::string::npos);
  }
}

TEST_CASE("an update that leaves the last element of a tensor") {
  const Report report = checked_with("optimizer", "ratio", {"tail=true"});
  const std::string text = report.text();
  CAPTURE(text);
  CHECK(report.count(Verdict::broken) == 1);
  CHECK(text.find("after a step whose gradients are large everywhere") != std::string::npos);
}

TEST_CASE("an update that takes an element behind a tensor") {
  const Report report = checked_with("optimizer", "ratio", {"beyond=true"}, {"locality"});
  const std::string text = report.text();
  CAPTURE(text);
  CHECK(report.count(Verdict::broken) == 1);
  CHECK(text.find("ratio_update_matrix: has written behind operand") != std::string::npos);
}

TEST_CASE("bf16 masters that are not rounded by chance, and by one draw for all elements") {
  check_setting("optimizer", "ratio", "masters=nearest", "masters in bf16", "roundings of a bf16 master's elements");
  check_setting("optimizer", "ratio", "masters=one", "masters in bf16", "roundings of a bf16 master's elements");
}

TEST_CASE("trainings that share a counter") {
  const Report report = checked_with("optimizer", "ratio", {"shared=true"});
  const std::string text = report.text();
  CAPTURE(text);
  CHECK(text.find("after three steps with another training beside it") != std::string::npos);
}

TEST_CASE("blocks that have no guard are counted") {
  const Report report = checked("schedule", "many_blocks");
  check_sound(report);
  CHECK(report.text().find(" are not, beyond the most at a time") != std::string::npos);
}

TEST_CASE("a log sink that loses its events where it cannot write") {
  check_broken("log", "loses_events", {"no run directory"},
               {"a run directory that is not there", "accepted, and its files are lost"});
}

TEST_CASE("a log sink that keeps events back, and an option without help") {
  check_broken("log", "keeps_back", {"describes itself", "flushes", "no run directory", "events leave nothing"},
               {"help of option unused"});
}

TEST_CASE("a schedule that is no number at one step of ten thousand, with an option that nothing reads") {
  check_broken("schedule", "late_nan", {"factors", "options"}, {"factor of step 8999 of 10000", "nan"});
}
