// Element-wise ops, sums of columns into others, and the column sum that is a bias's gradient.
#include "program/ops/ops.h"
#include "quern/step_state.h"

namespace quern::ops {

namespace {

constexpr std::int64_t kStepStateWords = sizeof(StepState) / 4;

}

void add_elementwise(OpSet& set) {
  set.add({.kind = "add",
           .inputs = {"a", "b"},
           .outputs = {"y"},
           .infer =
               [](InferContext& c) {
                 need_same(c, 1, 0);
                 same(c, 0, 0);
               },
           .backward =
               [](BackwardContext& b) {
                 b.set_input_grad(0, b.output_grad());
                 b.set_input_grad(1, b.output_grad());
               },
           .may_overwrite = {{0, 0}, {0, 1}},
           .commutative = true,
           .op_class = OpClass::add});

  for (const std::string kind : {"swiglu", "geglu"}) {
    set.add({.kind = kind,
             .inputs = {"gate_up"},
             .outputs = {"y"},
             .infer =
                 [](InferContext& c) {
                   need_rank(c, 0, 2);
                   std::int64_t width = c.inputs[0]->shape[1].fixed;
                   if (width % 2 != 0) c.refuse(0, "an even width: gate and up");
                   give(c, 0, {c.inputs[0]->shape[0], Dim(width / 2)}, c.inputs[0]->dtype);
                 },
             .backward =
                 [kind](BackwardContext& b) {
                   b.emit(kind + "_grad", {b.output_grad(), b.input(0)}, {0});
                 },
             .op_class = OpClass::activation});
    set.add(
        {.kind = kind + "_grad", .inputs = {"dy", "gate_up"}, .outputs = {"dgate_up"}, .infer = [](InferContext& c) {
           same(c, 0, 1);
         }});
  }

  set.add({.kind = "scale",
           .inputs = {"x"},
           .outputs = {"y"},
           .infer = [](InferContext& c) { same(c, 0, 0); },
           .backward = [](BackwardContext& b) { b.emit("scale", {b.output_grad()}, {0}, b.op().attributes); },
           .may_overwrite = {{0, 0}}});
  // x with elements set to zero at random, others divided by 1 - probability; `step` is the run's StepState.
  set.add({.kind = "dropout",
           .inputs = {"x", "step"},
           .outputs = {"y"},
           .infer =
               [](InferContext& c) {
                 need_vector(c, 1, kStepStateWords);
                 same(c, 0, 0);
               },
           .backward =
               [](BackwardContext& b) {
                 b.emit("dropout_grad", {b.output_grad(), b.input(0), b.input(1)}, {0}, b.op().attributes);
               }});
  set.add({.kind = "dropout_grad",
           .inputs = {"dy", "x", "step"},
           .outputs = {"dx"},
           .infer =
               [](InferContext& c) {
                 need_same(c, 1, 0);
                 need_vector(c, 2, kStepStateWords);
                 same(c, 0, 0);
               },
           .may_overwrite = {{0, 0}}});
  // Of logits, outside the loss, which has a cap of its own.
  set.add({.kind = "soft_cap",
           .inputs = {"x"},
           .outputs = {"y"},
           .infer = [](InferContext& c) { same(c, 0, 0); },
           .may_overwrite = {{0, 0}}});

  set.add({.kind = "gelu",
           .inputs = {"x"},
           .outputs = {"y"},
           .infer = [](InferContext& c) { same(c, 0, 0); },
           .backward =
               [](BackwardContext& b) {
                 b.emit("gelu_grad", {b.output_grad(), b.input(0)}, {0}, b.op().attributes);
               },
           .may_overwrite = {{0, 0}},
           .op_class = OpClass::activation});
  set.add({.kind = "gelu_grad",
           .inputs = {"dy", "x"},
           .outputs = {"dx"},
           .infer = [](InferContext& c) { same(c, 0, 0); },
           .may_overwrite = {{0, 0}}});

  set.add({.kind = "column_sum", .inputs = {"x"}, .outputs = {"sum"}, .infer = [](InferContext& c) {
             need_rank(c, 0, 2);
             give(c, 0, {c.inputs[0]->shape[1]}, c.inputs[0]->dtype);
           }});
}

}  // namespace quern::ops
