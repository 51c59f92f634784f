// What a program is estimated to take.
#include "plan/time/estimate.h"

#include <doctest/doctest.h>

#include "plan/test_plans.h"
#include "program/passes/observe.h"
#include "quern/op_spec.h"

using namespace quern;

TEST_CASE("observing is no part of the estimate, since few steps do") {
  const OpSet ops = builtin_ops();
  Program program;
  program.name = "block";
  const ValueId x =
      program.add_value({.name = "x", .shape = {Dim::tokens(), 64}, .dtype = DType::bf16, .role = Role::boundary});
  program.inputs = {x};
  const ValueId y = append_op(program, ops, DType::bf16, {.kind = "swiglu", .inputs = {x}}, "y")[0];
  const std::vector<ValueId> codes =
      append_op(program, ops, DType::bf16,
                {.kind = "quantize", .inputs = {y}, .attributes = {{"format", std::string("e4m3")}}}, "y.e4m3");
  program.outputs = {codes[0], codes[1]};
  Program observed = program;
  observe_scales(observed, ops);
  REQUIRE(observed.ops.size() == program.ops.size() + 1);
  const PlanningDevice device;
  const Geometry geometry{4, 64};
  const double seconds = program_seconds(program, ops, geometry, device);
  CHECK(seconds > 0);
  CHECK(program_seconds(observed, ops, geometry, device) == seconds);
}

TEST_CASE("a launch takes what the device tells, else what its work takes at the device's rates") {
  const Cost cost{.bytes = 1e9};
  const PlanningDevice device;
  CHECK(launch_seconds({}, cost, device.traits()) == 1);
  CHECK(launch_seconds({.seconds = 3}, cost, device.traits()) == 3);
}
