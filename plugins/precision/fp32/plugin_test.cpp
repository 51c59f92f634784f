#include <doctest/doctest.h>

#include "quern/testkit/plugin_under_test.h"
#include "quern/testkit/recorded_lowering.h"

using namespace quern;

TEST_CASE("fp32 is f32 throughout and lowers each to one plain matmul") {
  auto backend = testkit::plugin_under_test<PrecisionBackend>("fp32");
  CHECK(backend->traits().activation == DType::f32);
  CHECK(backend->traits().working == DType::f32);
  CHECK(backend->traits().matmul == DType::f32);
  CHECK(testkit::plain_linear_fault(*backend) == "");
}
