// Sums over ranks, whose elements a communicator has brought here, and over micro-batches. One op for all, so that all
// give the same bits.
#include "program/ops/ops.h"

namespace quern::ops {

void add_reduction(OpSet& set) {
  set.add({.kind = "reduce_ranks", .inputs = {"x", "own?"}, .outputs = {"y"}, .infer = [](InferContext& c) {
             need_rank(c, 0, 2);
             give(c, 0, {c.inputs[0]->shape[1]}, c.inputs[0]->dtype);
           }});
  // Of each tensor the sum of this micro-batch and the partial sums; both are updated in place.
  set.add({.kind = "sum_tree",
           .inputs = {"step", "tensors*"},
           .outputs = {"sum", "partials"},
           .infer =
               [](InferContext& c) {
                 for (std::size_t i = 0; i < c.outputs.size(); ++i) same(c, i, 1 + i);
               },
           .updates = {{0, 1}, {1, 2}}});
}

}  // namespace quern::ops
