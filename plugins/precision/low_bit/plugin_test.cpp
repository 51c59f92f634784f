#include <doctest/doctest.h>

#include "quern/error.h"
#include "quern/testkit/plugin_under_test.h"
#include "quern/testkit/recorded_lowering.h"

using namespace quern;

namespace {

std::unique_ptr<PrecisionBackend> low_bit(const std::string& weights, const std::string& activations,
                                          const std::string& gradients = "bf16") {
  OptionValues values;
  values.set("weights", weights);
  values.set("activations", activations);
  values.set("gradients", gradients);
  return testkit::plugin_under_test<PrecisionBackend>("low_bit", values);
}

}  // namespace

TEST_CASE("low_bit: bf16 matmuls read weights dequantized for each, and weight gradients read none") {
  for (const char* weights : {"int8", "int4", "ternary"}) {
    const testkit::RecordedLowering lowering = testkit::lowered_linear(*low_bit(weights, "bf16"));
    REQUIRE(lowering.produced.size() == 4);
    for (const Op& op : lowering.produced) CHECK(op.kind == "matmul");
    for (const auto& copy : lowering.copies) {
      CHECK(copy.kind == "quantize_weights");
      CHECK(copy.attributes == Attributes{{"format", std::string(weights)}});
    }
    REQUIRE(lowering.emitted.size() == 3);
    CHECK(lowering.emitted[0].attributes.word("use") == "output");
    CHECK(lowering.emitted[2].attributes.word("use") == "input_gradient");  // not kept from the forward pass
    CHECK(testkit::line_of(lowering.produced[3]) == "matmul(4, 1) transpose_a=1 transpose_b=0");
  }
}

TEST_CASE("low_bit: int8 activations are multiplied with integers and read again by the weight gradient") {
  for (const char* weights : {"int8", "ternary"}) {
    const testkit::RecordedLowering lowering = testkit::lowered_linear(*low_bit(weights, "int8"));
    REQUIRE(lowering.produced.size() == 4);
    CHECK(lowering.produced[0].inputs.size() == 5);  // with row scales
    CHECK(lowering.produced[2].inputs.size() == 2);
    CHECK(lowering.produced[3].inputs[0] == 4);
    CHECK(lowering.produced[3].inputs[1] != 1);
  }
  CHECK(low_bit("ternary", "int8")->traits().matmul == DType::i8);
}

TEST_CASE("low_bit: int8 operands round stochastically where asked") {
  const testkit::RecordedLowering lowering = testkit::lowered_linear(*low_bit("int8", "int8_stochastic"));
  int stochastic = 0;
  for (const Op& op : lowering.emitted) {
    CHECK(op.attributes.integer_or("stochastic", 0) == (op.kind == "quantize_rows" ? 1 : 0));
    stochastic += op.kind == "quantize_rows";
  }
  CHECK(stochastic == 3);  // of two outputs and of the weight gradient, which reads the same values
}

TEST_CASE("low_bit: matmuls of gradients are int8 with any weights and activations") {
  for (const char* weights : {"int8", "int4", "ternary"})
    for (const char* rounding : {"int8", "int8_stochastic"}) {
      const testkit::RecordedLowering lowering = testkit::lowered_linear(*low_bit(weights, "bf16", rounding));
      REQUIRE(lowering.produced.size() == 4);
      for (const std::size_t gradient : {2, 3}) {
        CHECK(lowering.produced[gradient].inputs.size() == 5);
        CHECK(lowering.produced[gradient].attributes.integer("transpose_b") == 1);
      }
      CHECK(lowering.produced[0].inputs.size() == 3);
      for (const Op& op : lowering.emitted)
        if (op.kind != "dequantize_weights") {
          const bool drawn = op.inputs[0] == 4 && std::string(rounding) == "int8_stochastic";
          CHECK(op.attributes.integer_or("stochastic", 0) == (drawn ? 1 : 0));
        }
      CHECK(testkit::line_of(lowering.emitted.back()) == "quantize_columns(1) format=i8");
    }
  CHECK(low_bit("int4", "bf16", "int8")->traits().matmul == DType::i8);
}

TEST_CASE("low_bit: scales within a row are refused for int8 matmuls by key") {
  CHECK_THROWS_WITH_AS(low_bit("int4", "int8"), doctest::Contains("precision.low_bit.activations"), Error);
}
