// The exported manifest, and the three products as the backend lowers them.
#include "quern/plugin.h"

#include <doctest/doctest.h>

#include "quern/testkit/recorded_lowering.h"

extern "C" void quern_plugin_manifest(quern::Manifest& manifest);

using namespace quern;

namespace {

std::unique_ptr<PrecisionBackend> make() {
  Manifest manifest;
  quern_plugin_manifest(manifest);
  REQUIRE(manifest.factories.size() == 1);
  CHECK(manifest.factories[0].kind == "precision");
  CHECK(manifest.factories[0].id == "fp32");
  return std::unique_ptr<PrecisionBackend>(static_cast<PrecisionBackend*>(manifest.factories[0].create({})));
}

}  // namespace

TEST_CASE("fp32 is f32 throughout and lowers each product to one matmul") {
  auto backend = make();
  CHECK(backend->traits().activation == DType::f32);
  CHECK(backend->traits().working == DType::f32);
  CHECK(backend->traits().matmul == DType::f32);
  testkit::RecordedLowering lowering;
  backend->lower({.product = Product::output, .parameter = "w", .x = 1, .weight = 2, .bias = 3, .result = 9}, lowering);
  backend->lower({.product = Product::output, .parameter = "w", .x = 1, .weight = 2, .result = 9}, lowering);
  backend->lower({.product = Product::input_gradient, .parameter = "w", .weight = 2, .dy = 4, .result = 9}, lowering);
  backend->lower({.product = Product::weight_gradient, .parameter = "w", .x = 1, .dy = 4, .result = 9}, lowering);
  CHECK(lowering.emitted.empty());
  REQUIRE(lowering.produced.size() == 4);
  auto check = [&](std::size_t i, std::vector<ValueId> inputs, std::int64_t transpose_a, std::int64_t transpose_b) {
    CHECK(lowering.produced[i].kind == "matmul");
    CHECK(lowering.produced[i].inputs == inputs);
    CHECK(lowering.produced[i].attributes == Attributes{{"transpose_a", transpose_a}, {"transpose_b", transpose_b}});
  };
  check(0, {1, 2, 3}, 0, 1);
  check(1, {1, 2, kNoValue}, 0, 1);
  check(2, {4, 2}, 0, 0);
  check(3, {4, 1}, 1, 0);
}
