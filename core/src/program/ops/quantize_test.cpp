// Shapes of quantize_blocks: linear in the tokens, and at every number of them what devices expect.
#include <doctest/doctest.h>

#include "quern/block_scales.h"
#include "quern/error.h"
#include "quern/op_spec.h"

using namespace quern;

namespace {

std::vector<Value> inferred(Shape shape, std::int64_t square, const char* kind = "quantize_blocks") {
  Program program;
  const ValueId x = program.add_value({.name = "x", .shape = std::move(shape), .dtype = DType::bf16});
  std::vector<Value> values;
  for (ValueId id : append_op(
           program, builtin_ops(), DType::bf16,
           {.kind = kind, .inputs = {x}, .attributes = {{"format", std::string("e4m3")}, {"square", square}}}, "q"))
    values.push_back(program[id]);
  return values;
}

}  // namespace

TEST_CASE("quantize_blocks, quantize_squares: shapes of a matrix of tokens follow its scales' layouts") {
  for (const char* kind : {"quantize_blocks", "quantize_squares"}) {
    const std::vector<Value> made = inferred({Dim::tokens(), 300}, 0, kind);
    for (std::int64_t tokens : {1, 127, 128, 129, 4096}) {
      CHECK(extents_at(made[0].shape, {1, tokens}) == Extents{tokens, 300});
      CHECK(extents_at(made[1].shape, {1, tokens}) == row_block_scales(tokens, 300));
      CHECK(extents_at(made[2].shape, {1, tokens}) == Extents{300, tokens});
      CHECK(extents_at(made[3].shape, {1, tokens}) == column_block_scales(tokens, 300));
      CHECK(element_count(column_block_scales(tokens, 300)) >= scale_blocks(tokens) * 300);
    }
    CHECK(made[1].dtype == DType::f32);
    CHECK(made[2].dtype == DType::e4m3);
  }
}

TEST_CASE("quantize_blocks: squares are of parameters alone") {
  const std::vector<Value> made = inferred({260, 640}, 1);
  CHECK(extents_at(made[1].shape, {1, 1}) == Extents{3, 8});
  CHECK(extents_at(made[3].shape, {1, 1}) == Extents{5, 4});
  CHECK_THROWS_WITH_AS(inferred({Dim::tokens(), 640}, 1), doctest::Contains("do not depend on the micro-batch"), Error);
  CHECK_THROWS_WITH_AS(inferred({640, Dim::tokens()}, 0), doctest::Contains("rows whose size"), Error);
}
