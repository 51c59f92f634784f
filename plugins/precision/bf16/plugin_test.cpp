#include <doctest/doctest.h>

#include "quern/testkit/plugin_under_test.h"
#include "quern/testkit/recorded_lowering.h"

using namespace quern;

namespace {

std::unique_ptr<PrecisionBackend> make(const char* transposed_weights) {
  OptionValues values;
  values.set("transposed_weights", std::string(transposed_weights));
  return testkit::plugin_under_test<PrecisionBackend>("bf16", values);
}

}  // namespace

TEST_CASE("bf16 is bf16 throughout and lowers each to one plain matmul") {
  auto backend = make("none");
  CHECK(backend->traits().activation == DType::bf16);
  CHECK(backend->traits().working == DType::bf16);
  CHECK(backend->traits().matmul == DType::bf16);
  CHECK(testkit::plain_linear_fault(*backend) == "");
}

TEST_CASE("kept transposed weights are what input gradients read, and nothing else changes") {
  const testkit::RecordedLowering lowering = testkit::lowered_linear(*make("kept"));
  REQUIRE(lowering.copies.size() == 1);
  CHECK(lowering.copies[0].parameter == "w");
  CHECK(lowering.copies[0].kind == "transpose");
  REQUIRE(lowering.produced.size() == 4);
  CHECK(lowering.produced[0].inputs == std::vector<ValueId>{1, 2, 3});
  CHECK(testkit::line_of(lowering.produced[2]) == "matmul(4, 1000) transpose_a=0 transpose_b=1");
  CHECK(lowering.produced[3].inputs == std::vector<ValueId>{4, 1});
}
