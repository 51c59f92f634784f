#include "optimizer/stack_matrices.h"

#include <algorithm>
#include <memory>

#include <doctest/doctest.h>

#include "optimizer/optimizers.h"
#include "optimizer/update_traits.h"
#include "program/names.h"
#include "quern/plugin.h"

using namespace quern;

namespace {

/// Muon's update of matrices of 12 x 8, packed of parts of 4 and 8 rows, and of one of 8 x 4.
Program update_of(const OpSet& ops, int packed) {
  const std::vector<Factory> all = optimizer_factories();
  const auto muon = std::find_if(all.begin(), all.end(), [](const Factory& factory) { return factory.id == "muon"; });
  const std::unique_ptr<Optimizer> optimizer(static_cast<Optimizer*>(muon->create(default_values(muon->options))));
  UpdateBuilder builder = update_builder(ops, names::kStep);
  std::vector<ParameterSpec> specs;
  for (int i = 0; i < packed; ++i) {
    specs.push_back(matrix("packed" + std::to_string(i), ParameterGroup::block, "w{layer}", 12, 8));
    specs.back().parts = {{.hf_name = "a{layer}", .rows = 4}, {.hf_name = "b{layer}", .rows = 8}};
  }
  specs.push_back(matrix("tall", ParameterGroup::block, "t{layer}", 8, 4));
  for (const ParameterSpec& spec : specs) {
    const std::vector<OptimizerState> states = optimizer->states(spec);
    auto add = [&](const std::string& name) {
      return builder.program().add_value({.name = name + spec.name,
                                          .shape = Shape(spec.extents.begin(), spec.extents.end()),
                                          .dtype = DType::f32,
                                          .role = Role::state});
    };
    const ValueId gradient = add("gradient."), master = add("master."), moment = add("moment.");
    builder.begin({.spec = &spec, .states = states, .gradient = gradient, .master = master, .state_values = {moment}});
    optimizer->update(builder, spec);
  }
  return builder.take();
}

std::vector<const Op*> of_kind(const Program& program, const std::string& kind) {
  std::vector<const Op*> found;
  for (const Op& op : program.ops)
    if (op.kind == kind) found.push_back(&op);
  return found;
}

}  // namespace

TEST_CASE("equal matrices of an update are one stack, in an order that keeps what each op reads") {
  const OpSet ops = builtin_ops();
  const Program whole = update_of(ops, 3), stacked = stack_matrices(whole, kStackBytes);
  check_program(stacked);
  CHECK(of_kind(whole, "stacked_matmul").size() == 7 * 15);
  CHECK(of_kind(stacked, "stacked_matmul").size() == 3 * 15);  // 4 x 8, 8 x 8 and 8 x 4
  REQUIRE(of_kind(stacked, "muon_apply").size() == 7);
  std::vector<std::int64_t> counts;
  for (const Op* op : of_kind(stacked, "over_norm")) {
    counts.push_back(stacked[op->outputs[0]].shape[0].fixed);
    CHECK(static_cast<std::int64_t>(op->inputs.size()) == counts.back() + 1);
    CHECK(stacked[op->inputs[0]].shape[0].fixed == counts.back());
  }
  CHECK(counts == std::vector<std::int64_t>{3, 3, 1});
  // Each step takes its own matrix: the master's is where the direction of its momentum is.
  for (const Op* apply : of_kind(stacked, "muon_apply")) {
    const std::string master = stacked[apply->inputs[2]].name.substr(std::string("master.").size());
    ValueId stack = apply->inputs[3];
    const Op* begin = nullptr;
    while (!begin) {
      const Op& maker = stacked.ops[static_cast<std::size_t>(stacked.producer(stack))];
      if (maker.kind == "over_norm")
        begin = &maker;
      else
        stack = maker.inputs[0];
    }
    const ValueId matrix = begin->inputs[static_cast<std::size_t>(apply->attributes.integer("index")) + 1];
    const Op& direction = stacked.ops[static_cast<std::size_t>(stacked.producer(matrix))];
    CHECK(stacked[direction.inputs[3]].name == "moment." + master);
    CHECK(direction.attributes.integer("first") == apply->attributes.integer("first"));
  }
}

TEST_CASE("stacks are as large as their memory and even") {
  const OpSet ops = builtin_ops();
  const Program stacked = stack_matrices(update_of(ops, 5), 3 * 8 * 8 * 2);  // three of 8 x 8 in bf16
  std::vector<std::int64_t> counts;
  for (const Op* op : of_kind(stacked, "over_norm")) counts.push_back(stacked[op->outputs[0]].shape[0].fixed);
  CHECK(counts == std::vector<std::int64_t>{5, 2, 3, 1});
  CHECK(of_kind(stack_matrices(update_of(ops, 2), 1), "over_norm").size() == 5);
}

TEST_CASE("a matrix is in no stack whose reader takes none out of it") {
  const OpSet ops = builtin_ops();
  Program whole = update_of(ops, 3);
  // An op reads all of the second matrix of 4 x 8, another the sum of squares of the third.
  const ValueId orthogonal = of_kind(whole, "muon_apply")[2]->inputs[3];
  const ValueId square = of_kind(whole, "over_norm")[4]->inputs[0];
  append_op(whole, ops, DType::f32, {.kind = "sum_squares", .inputs = {orthogonal}}, "size");
  append_op(whole, ops, DType::f32, {.kind = "sum_squares", .inputs = {square}}, "size");
  const Program stacked = stack_matrices(whole, kStackBytes);
  check_program(stacked);
  std::vector<std::int64_t> counts;
  for (const Op* op : of_kind(stacked, "over_norm")) counts.push_back(stacked[op->outputs[0]].shape[0].fixed);
  std::sort(counts.begin(), counts.end());
  CHECK(counts == std::vector<std::int64_t>{1, 1, 1, 1, 3});
  for (const Op* op : {&stacked.ops[stacked.ops.size() - 2], &stacked.ops.back()}) {
    REQUIRE(op->kind == "sum_squares");
    CHECK(op->attributes.all().empty());
    CHECK(stacked[op->inputs[0]].shape[0].fixed == 1);
  }
  CHECK(stacked.ops[stacked.ops.size() - 2].inputs[0] == orthogonal);
  CHECK(stacked.ops.back().inputs[0] == square);
}

TEST_CASE("a matrix over another's norm is in no stack, nor is the other") {
  const OpSet ops = builtin_ops();
  Program whole = update_of(ops, 2);
  std::vector<std::size_t> begins;
  for (std::size_t i = 0; i < whole.ops.size(); ++i)
    if (whole.ops[i].kind == "over_norm") begins.push_back(i);
  whole.ops[begins[2]].inputs[0] = whole.ops[begins[0]].inputs[0];  // both of 4 x 8
  const Program stacked = stack_matrices(whole, kStackBytes);
  for (const std::size_t i : {begins[0], begins[2]})
    CHECK(std::count(stacked.ops.begin(), stacked.ops.end(), whole.ops[i]) == 1);
  CHECK(of_kind(stacked, "over_norm").size() == 4);  // 8 x 8 is a stack of two
}
