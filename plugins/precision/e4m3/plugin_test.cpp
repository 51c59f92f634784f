// The recipe's lowering, product by product; float8_test.cpp in tests/ trains with it.
#include <doctest/doctest.h>

#include "../float8/recipe.h"
#include "quern/error.h"

using namespace quern;
using namespace quern::float8;

TEST_CASE("a recipe reads bf16 and names its operand format") {
  Recipe recipe({}, {});
  CHECK(recipe.traits().activation == DType::bf16);
  CHECK(recipe.traits().working == DType::bf16);
  CHECK(recipe.traits().matmul == DType::e4m3);
}

TEST_CASE("names of products that are none are refused") {
  RecipeOptions wrong;
  wrong.products = {"output", "input_grad"};
  CHECK_THROWS_WITH_AS(Recipe({}, wrong), doctest::Contains("input_grad"), Error);
  RecipeOptions fast;
  fast.head_fast_accumulation = {"head"};
  CHECK_THROWS_WITH_AS(Recipe({}, fast), doctest::Contains("head_fast_accumulation"), Error);
}
