// What an optimizer step is made of. Scalars that change from step to step are read from device memory: step_state.h.
#include "program/ops/ops.h"

namespace quern::ops {

void add_optimizer(OpSet& set) {
  set.add({.kind = "sum_squares", .inputs = {"x*"}, .outputs = {"sums"}, .infer = [](InferContext& c) {
             give(c, 0, {static_cast<std::int64_t>(c.inputs.size())}, DType::f64);
           }});
  set.add(
      {.kind = "clip_scale", .inputs = {"stats", "step", "sums*"}, .outputs = {"update"}, .infer = [](InferContext& c) {
         give(c, 0, {4}, DType::f32);
       }});
  // Loshchilov & Hutter, "Decoupled Weight Decay Regularization" (2019); bf16 results round stochastically. Any number
  // of tensors: gradient, master, moment1 and moment2 of each; the last three are updated in place.
  set.add({.kind = "adamw",
           .inputs = {"update", "step", "tensors*"},
           .outputs = {"new_master", "new_moment1", "new_moment2"},
           .infer =
               [](InferContext& c) {
                 for (std::size_t i = 0; i < c.outputs.size(); ++i) same(c, i, 2 + 4 * (i / 3) + 1 + i % 3);
               },
           .updates = {{0, 3}, {1, 4}, {2, 5}},
           .locality = UpdateLocality::element});
}

}  // namespace quern::ops
