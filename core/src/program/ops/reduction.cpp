// Sums over ranks, whose elements a communicator has brought here. One op for all, so that all give the same bits.
#include "program/ops/ops.h"

namespace quern::ops {

void add_reduction(OpSet& set) {
  set.add({.kind = "reduce_ranks", .inputs = {"x"}, .outputs = {"y"}, .infer = [](InferContext& c) {
             need_rank(c, 0, 2);
             give(c, 0, {c.inputs[0]->shape[1]}, c.inputs[0]->dtype);
           }});
}

}  // namespace quern::ops
