// Precision backends with one fault each.
#include "checked.h"

#include <algorithm>

#include <doctest/doctest.h>

using namespace quern;
using namespace quern::conformance;

TEST_CASE("a scale of the wrong operand") {
  check_broken("precision", "wrong_scale", {"linear", "odd sizes", "magnitudes", "gradients"},
               {"relative error of y", "got ", "want at most", "e4m3"});
}

TEST_CASE("state that a checkpoint does not have") {
  check_broken("precision", "loses_state", {"save and restore"}, {"after a restart", "got ", "want "});
}

TEST_CASE("infinities that vanish") {
  check_broken("precision", "swallows_infinity", {"infinities"}, {"inf in x", "want one that is not finite"});
}

TEST_CASE("evaluations without biases") {
  check_broken("precision", "no_bias_evaluated", {"linear", "odd sizes", "gradients"},
               {"relative error of y of a linear", "evaluated", "got ", "want at most"});
}

TEST_CASE("rounding by chance with one draw for a row, and rounding that is always up") {
  check_setting("precision", "draws_once", "draws=row", "rounding", "roundings in drawn_rows of x");
  check_setting("precision", "draws_once", "draws=none", "rounding", "the mean is");
}

TEST_CASE("integers of fewer steps than their stated format has, and of more") {
  auto report_of = [](const std::string& format, int largest) {
    return checked_with("precision", "coarse_codes", {"format=" + format, "largest=" + std::to_string(largest)});
  };
  check_sound(report_of("i8", 127));
  check_sound(report_of("i4", 7));
  for (const auto& [format, largest] : {std::pair("i8", 12), std::pair("i4", 2)}) {
    const Report report = report_of(format, largest);
    const std::string text = report.text();
    CAPTURE(text);
    const auto first = std::find_if(report.findings().begin(), report.findings().end(),
                                    [](const Finding& finding) { return finding.verdict == Verdict::broken; });
    REQUIRE(first != report.findings().end());
    CHECK(first->contract == "linear");
    CHECK(first->detail.find("relative error of y") != std::string::npos);
    CHECK(first->detail.find(std::string("for ") + format) != std::string::npos);
  }
  const Report beyond = report_of("i4", 9);
  const std::string text = beyond.text();
  CAPTURE(text);
  CHECK(beyond.count(Verdict::broken) == 1);
  CHECK(text.find("at most 7 in magnitude, the largest of its format") != std::string::npos);
}
