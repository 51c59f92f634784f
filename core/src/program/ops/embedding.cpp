// Token embedding: rows of a table. The backward sums the gradients of equal tokens in a fixed order.
#include "program/ops/ops.h"

namespace quern::ops {

void add_embedding(OpSet& set) {
  set.add({.kind = "embedding",
           .inputs = {"tokens", "table"},
           .outputs = {"y"},
           .infer =
               [](InferContext& c) {
                 need_rank(c, 0, 1);
                 need_rank(c, 1, 2);
                 give(c, 0, {c.inputs[0]->shape[0], c.inputs[1]->shape[1]}, c.activation_dtype);
               },
           .backward =
               [](BackwardContext& b) {
                 b.emit("embedding_grad", {b.output_grad(), b.input(0)}, {1},
                        {{"rows", b.program()[b.input(1)].shape[0].fixed}});
               },
           .may_overwrite = {},
           .updates = {},
           .cost = [](const OpInstance& op) {  // reads one row a token, not the table
             return Cost{.bytes = 2.0 * static_cast<double>(op.outputs[0].bytes()) +
                                  static_cast<double>(op.inputs[0].bytes())};
           }});

  set.add({.kind = "embedding_grad",
           .inputs = {"dy", "tokens"},
           .outputs = {"dtable"},
           .infer =
               [](InferContext& c) {
                 need_rank(c, 0, 2);
                 give(c, 0, {Dim(c.attributes.integer("rows")), c.inputs[0]->shape[1]}, c.inputs[0]->dtype);
               },
           .cost =
               [](const OpInstance& op) {
                 return Cost{.bytes = static_cast<double>(op.inputs[0].bytes() + op.outputs[0].bytes())};
               }});
}

}  // namespace quern::ops
