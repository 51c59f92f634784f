// The backend's requests, written down by a Lowering that makes no program.
#include <doctest/doctest.h>

#include "quern/plugin.h"
#include "quern/testkit/recorded_lowering.h"

extern "C" void quern_plugin_manifest(quern::Manifest& manifest);

using namespace quern;

namespace {

// The three products of a linear with weight 2: y = x W^T from x 1, and the gradients from dy 4.
testkit::RecordedLowering lower(const std::string& activations) {
  Manifest manifest;
  quern_plugin_manifest(manifest);
  OptionValues values;
  values.set("activations", activations);
  std::unique_ptr<PrecisionBackend> backend(static_cast<PrecisionBackend*>(manifest.factories.at(0).create(values)));
  testkit::RecordedLowering lowering;
  backend->lower({.product = Product::output, .parameter = "w", .x = 0, .weight = 2, .result = 9}, lowering);
  backend->lower({.product = Product::input_gradient, .parameter = "w", .weight = 2, .dy = 4, .result = 9}, lowering);
  backend->lower({.product = Product::weight_gradient, .parameter = "w", .x = 0, .dy = 4, .result = 9}, lowering);
  return lowering;
}

}  // namespace

TEST_CASE("the output reads a working copy of the weight, and gradients the weight itself") {
  testkit::RecordedLowering lowering = lower("bf16");
  REQUIRE(lowering.copies.size() == 1);
  CHECK(lowering.copies[0].kind == "quantize_rows");
  CHECK(lowering.copies[0].attributes.word("format") == "i8");
  CHECK(lowering.emitted.empty());
  REQUIRE(lowering.produced.size() == 3);
  CHECK(lowering.produced[0].inputs == std::vector<ValueId>{0, 1000, kNoValue, kNoValue, 1001});
  CHECK(lowering.produced[1].inputs == std::vector<ValueId>{4, 2});
  CHECK(lowering.produced[2].inputs == std::vector<ValueId>{4, 0});
}
