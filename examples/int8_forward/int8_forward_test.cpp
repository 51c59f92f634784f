// The backend's requests, written down by a Lowering that makes no program.
#include <doctest/doctest.h>

#include "quern/testkit/plugin_under_test.h"
#include "quern/testkit/recorded_lowering.h"

using namespace quern;

namespace {

testkit::RecordedLowering lower(const std::string& activations) {
  OptionValues values;
  values.set("activations", activations);
  return testkit::lowered_linear(*testkit::plugin_under_test<PrecisionBackend>("int8_forward", values));
}

}  // namespace

TEST_CASE("the output reads a working copy of the weight, and gradients the weight itself") {
  testkit::RecordedLowering lowering = lower("bf16");
  REQUIRE(lowering.copies.size() == 2);  // an output with a bias, and one without
  CHECK(lowering.copies[0].kind == "quantize_rows");
  CHECK(lowering.copies[0].attributes.word("format") == "i8");
  CHECK(lowering.emitted.empty());
  REQUIRE(lowering.produced.size() == 4);
  CHECK(lowering.produced[0].inputs == std::vector<ValueId>{1, 1000, 3, kNoValue, 1001});
  CHECK(lowering.produced[1].inputs == std::vector<ValueId>{1, 1003, kNoValue, kNoValue, 1004});
  CHECK(lowering.produced[2].inputs == std::vector<ValueId>{4, 2});
  CHECK(lowering.produced[3].inputs == std::vector<ValueId>{4, 1});
}
