// What an op's spec says must agree with itself.
#include <doctest/doctest.h>

#include "quern/error.h"
#include "quern/op_spec.h"
#include "quern/testkit/refusal.h"

using namespace quern;

TEST_CASE("an output that is an operand, updated in place, has its shape and dtype") {
  OpSet ops;
  ops.add({.kind = "mean",
           .inputs = {"x"},
           .outputs = {"y"},
           .infer =
               [](InferContext& c) {
                 c.outputs[0].shape = {c.attributes.integer("size")};
                 c.outputs[0].dtype = DType::f32;
               },
           .updates = {{0, 0}}});
  auto append = [&](std::int64_t size, DType dtype) {
    Program program;
    const ValueId x = program.add_value({.name = "x", .shape = {8}, .dtype = dtype});
    append_op(program, ops, DType::f32, {.kind = "mean", .inputs = {x}, .attributes = {{"size", size}}}, "y");
  };
  append(8, DType::f32);
  CHECK(testkit::refusal(ErrorCode::config, [&] { append(7, DType::f32); }).find("found f32 (7), expected f32 (8)") !=
        std::string::npos);
  CHECK(testkit::refusal(ErrorCode::config, [&] { append(8, DType::bf16); }).find("op mean, output 0") !=
        std::string::npos);
}
