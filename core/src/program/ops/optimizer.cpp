// What an optimizer step is made of. Scalars that change from step to step are read from device memory: step_state.h.
#include "program/ops/ops.h"

namespace quern::ops {

void add_optimizer(OpSet& set) {
  set.add({.kind = "sum_squares", .inputs = {"x"}, .outputs = {"sum"}, .infer = [](InferContext& c) {
             give(c, 0, {1}, DType::f64);
           }});
  set.add(
      {.kind = "clip_scale", .inputs = {"stats", "step", "sums*"}, .outputs = {"update"}, .infer = [](InferContext& c) {
         give(c, 0, {4}, DType::f32);
       }});
  // Loshchilov & Hutter, "Decoupled Weight Decay Regularization" (2019); bf16 results round stochastically.
  set.add({.kind = "adamw",
           .inputs = {"gradient", "master", "moment1", "moment2", "update", "step"},
           .outputs = {"new_master", "new_moment1", "new_moment2"},
           .infer =
               [](InferContext& c) {
                 for (std::size_t i = 0; i < 3; ++i) same(c, i, i + 1);
               },
           .updates = {{0, 1}, {1, 2}, {2, 3}}});
}

}  // namespace quern::ops
