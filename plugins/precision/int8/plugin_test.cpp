#include <doctest/doctest.h>

#include "quern/testkit/plugin_under_test.h"
#include "quern/testkit/recorded_lowering.h"

using namespace quern;

namespace {

testkit::RecordedLowering lowered(const OptionValues& values) {
  return testkit::lowered_linear(*testkit::plugin_under_test<PrecisionBackend>("int8", values));
}

}  // namespace

TEST_CASE("int8: every matmul reads quantized values with a scale for each row along k") {
  const testkit::RecordedLowering lowering = lowered({});
  REQUIRE(lowering.produced.size() == 4);
  for (const Op& op : lowering.produced) {
    CHECK(op.kind == "matmul");
    CHECK(op.inputs.size() == 5);
    CHECK(op.attributes.integer("transpose_b") == 1);
  }
  for (const auto& copy : lowering.copies) CHECK(copy.attributes.word("format") == "i8");
  CHECK(lowering.copies[0].kind == "quantize_rows");
  CHECK(lowering.copies[2].kind == "quantize_columns");  // sums over the weight's rows
  for (const Op& op : lowering.emitted) CHECK(op.attributes.word("format") == "i8");
  CHECK(testkit::line_of(lowering.emitted.back()) == "quantize_columns(1) format=i8");  // sums over tokens
  CHECK(lowering.states.empty());
}

TEST_CASE("int8: with stochastic rounding gradients round so, and no others") {
  OptionValues values;
  values.set("gradient_rounding", std::string("stochastic"));
  const testkit::RecordedLowering lowering = lowered(values);
  int gradients = 0;
  for (const Op& op : lowering.emitted) {
    const bool gradient = op.inputs[0] == 4;
    CHECK(op.attributes.integer_or("stochastic", 0) == (gradient ? 1 : 0));
    gradients += gradient;
  }
  CHECK(gradients == 2);
  for (const auto& copy : lowering.copies) CHECK_FALSE(copy.attributes.has("stochastic"));
}

TEST_CASE("int8: matmuls that are not listed read bf16") {
  OptionValues values;
  values.set("products", std::vector<std::string>{});
  CHECK(testkit::plain_linear_fault(*testkit::plugin_under_test<PrecisionBackend>("int8", values)) == "");
  values.set("products", std::vector<std::string>{"output"});
  const testkit::RecordedLowering lowering = lowered(values);
  REQUIRE(lowering.produced.size() == 4);
  CHECK(lowering.produced[0].inputs.size() == 5);
  CHECK(lowering.produced[3].inputs == std::vector<ValueId>{4, 1});
}
