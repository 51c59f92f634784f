#include <doctest/doctest.h>

#include "quern/testkit/plugin_under_test.h"
#include "quern/testkit/recorded_lowering.h"

using namespace quern;

TEST_CASE(
    "int4: every matmul multiplies int8 values of at most 4 bits with row scales, and gradients round by chance") {
  const auto precision = testkit::plugin_under_test<PrecisionBackend>("int4", {});
  CHECK(precision->traits().matmul == DType::i8);
  const testkit::RecordedLowering lowering = testkit::lowered_linear(*precision);
  REQUIRE(lowering.produced.size() == 4);
  for (const Op& op : lowering.produced) {
    CHECK(op.kind == "matmul");
    CHECK(op.inputs.size() == 5);
  }
  for (const auto& copy : lowering.copies) CHECK(copy.attributes.word("format") == "i4");
  for (const Op& op : lowering.emitted) {
    CHECK(op.attributes.word("format") == "i4");
    CHECK((op.kind == "quantize_rows" || op.kind == "quantize_columns"));
    const bool gradient = op.inputs[0] == 4;
    CHECK(op.attributes.integer_or("stochastic", 0) == (gradient ? 1 : 0));
  }
}
