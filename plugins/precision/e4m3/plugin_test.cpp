// The recipe's lowering, matmul by matmul; eight_bit_test.cpp in tests/ trains with it.
#include <map>

#include <doctest/doctest.h>

#include "quern/error.h"
#include "shared/eight_bit/recipe.h"

using namespace quern;
using namespace quern::eight_bit;

namespace {

/// Writes down what a recipe asks for: "y = matmul(x.q, w.q, -, x.scale, w.scale)".
class Recorder final : public Lowering {
 public:
  const Program& program() const override { return program_; }
  bool training() const override { return true; }
  std::vector<ValueId> emit(std::string kind, std::vector<ValueId> inputs, Attributes, std::string) override {
    return outputs_of(kind, program_[inputs[0]].name);
  }
  void produce(std::string kind, std::vector<ValueId> inputs, Attributes attributes) override {
    text_ = kind + "(";
    for (std::size_t i = 0; i < inputs.size(); ++i)
      text_ += (i > 0 ? ", " : "") + (inputs[i] == kNoValue ? "-" : program_[inputs[i]].name);
    text_ += ")";
    if (attributes.has("scale_rows_b")) text_ += " " + std::to_string(attributes.integer("scale_rows_b"));
    if (attributes.has("square_scales")) text_ += " squares";
  }
  ValueId state(StateSpec spec) override { return value(spec.name); }
  std::vector<ValueId> working_copy(std::string_view parameter, std::string kind, Attributes attributes) override {
    if (attributes.has("square")) kind += "_square";
    return outputs_of(kind, std::string(parameter));
  }

  ValueId value(const std::string& name) { return program_.add_value({.name = name}); }
  const std::string& text() const { return text_; }

 private:
  std::vector<ValueId> outputs_of(const std::string& kind, std::string of) {
    static const std::map<std::string, std::vector<std::string>> kOutputs = {
        {"quantize", {"q", "scale", "t"}},
        {"quantize_delayed", {"q", "scale", "t"}},
        {"quantize_rows", {"rows", "row_scale"}},
        {"quantize_columns", {"columns", "column_scale"}},
        {"quantize_blocks", {"q128", "scale128", "t128", "t_scale128"}},
        {"quantize_blocks_square", {"q128x128", "scale128x128", "t128x128", "t_scale128x128"}},
        {"quantize_squares", {"qsq", "scale_sq", "tsq", "t_scale_sq"}},
        {"transpose", {"turned"}}};
    std::vector<ValueId> ids;
    for (const std::string& output : kOutputs.at(kind)) ids.push_back(value(of + "." + output));
    return ids;
  }

  Program program_;
  std::string text_;
};

std::string lowered(Product product, const std::string& activation, const std::string& gradient,
                    const std::string& transposed_weights = "kept") {
  RecipeOptions options;
  options.activation_scaling = activation;
  options.gradient_scaling = gradient;
  options.transposed_weights = transposed_weights;
  Recorder recorder;
  ProductSite site{.product = product,
                   .parameter = "w",
                   .x = recorder.value("x"),
                   .weight = recorder.value("w"),
                   .dy = recorder.value("dy")};
  Recipe({}, options).lower(site, recorder);
  return recorder.text();
}

}  // namespace

TEST_CASE("a recipe reads bf16 and names its operand format") {
  Recipe recipe({}, {});
  CHECK(recipe.traits().activation == DType::bf16);
  CHECK(recipe.traits().working == DType::bf16);
  CHECK(recipe.traits().matmul == DType::e4m3);
}

TEST_CASE("the three matmuls read operands with scales that fit them") {
  const Product output = Product::output, input = Product::input_gradient, weight = Product::weight_gradient;
  for (const char* one : {"delayed", "current"}) {
    CHECK(lowered(output, one, one) == "matmul(x.q, w.q, -, x.scale, w.scale)");
    CHECK(lowered(input, one, one) == "matmul(dy.q, w.t, -, dy.scale, w.scale)");
    CHECK(lowered(input, one, one, "made") == "matmul(dy.q, w.q.turned, -, dy.scale, w.scale)");
    CHECK(lowered(weight, one, one) == "matmul(dy.t, x.t, -, dy.scale, x.scale)");
  }
  CHECK(lowered(output, "row", "row") == "matmul(x.rows, w.rows, -, x.row_scale, w.row_scale)");
  CHECK(lowered(input, "row", "row") == "matmul(dy.rows, w.columns, -, dy.row_scale, w.column_scale)");
  CHECK(lowered(input, "row", "row", "made") == "matmul(dy.rows, w.columns, -, dy.row_scale, w.column_scale)");
  CHECK(lowered(weight, "row", "row") == "matmul(dy.columns, x.columns, -, dy.column_scale, x.column_scale)");
  CHECK(lowered(output, "block", "block") == "matmul(x.q128, w.q128x128, -, x.scale128, w.scale128x128) 128");
  CHECK(lowered(input, "block", "block") == "matmul(dy.q128, w.t128x128, -, dy.scale128, w.t_scale128x128) 128");
  CHECK(lowered(input, "block", "block", "made") ==
        "matmul(dy.q128, w.q128x128.turned, -, dy.scale128, w.t_scale128x128) 128");
  CHECK(lowered(weight, "block", "block") == "matmul(dy.t128, x.t128, -, dy.t_scale128, x.t_scale128) 1");
  CHECK(lowered(output, "square", "square") == "matmul(x.qsq, w.q128x128, -, x.scale_sq, w.scale128x128) 128 squares");
  CHECK(lowered(input, "square", "square") ==
        "matmul(dy.qsq, w.t128x128, -, dy.scale_sq, w.t_scale128x128) 128 squares");
  CHECK(lowered(weight, "square", "square") == "matmul(dy.tsq, x.tsq, -, dy.t_scale_sq, x.t_scale_sq) 1 squares");
}

TEST_CASE("a weight gradient whose roles have scales of two kinds reads one scale a tensor") {
  for (const char* other : {"delayed", "current", "row", "square"}) {
    CHECK(lowered(Product::weight_gradient, "block", other) == "matmul(dy.t, x.t, -, dy.scale, x.scale)");
    CHECK(lowered(Product::weight_gradient, other, "block") == "matmul(dy.t, x.t, -, dy.scale, x.scale)");
  }
}

TEST_CASE("unknown names of matmuls are refused") {
  RecipeOptions wrong;
  wrong.products = {"output", "input_grad"};
  CHECK_THROWS_WITH_AS(Recipe({}, wrong), doctest::Contains("input_grad"), Error);
  RecipeOptions fast;
  fast.head_fast_accumulation = {"head"};
  CHECK_THROWS_WITH_AS(Recipe({}, fast), doctest::Contains("head_fast_accumulation"), Error);
}
