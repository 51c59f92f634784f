// Ops between the tokens of a micro-batch and its rows, for models whose losses are of rows: tokens put first in
// each row, means over tokens of a row, and a loss of a class for each row.
#include "program/ops/ops.h"

namespace quern::ops {

namespace {

/// N with `prefix` tokens less in each row.
Dim tokens_without(std::int64_t prefix) {
  Dim dim = Dim::tokens();
  dim.per_row = -prefix;
  return dim;
}

void need_tokens(const InferContext& c, std::size_t input) {
  need_rank(c, input, 2);
  if (c.inputs[input]->shape[0] != Dim::tokens()) c.refuse(input, "(N, width)");
}

}  // namespace

void add_token_rows(OpSet& set) {
  set.add(
      {.kind = "prepend",
       .inputs = {"x", "tokens"},
       .outputs = {"y"},
       .infer =
           [](InferContext& c) {
             need_rank(c, 0, 2);
             need_rank(c, 1, 2);
             const Shape& tokens = c.inputs[1]->shape;
             const Shape others{tokens_without(tokens[0].fixed), tokens[1]};
             if (!tokens[0].is_fixed() || c.inputs[0]->shape != others) c.refuse(0, to_string(others));
             give(c, 0, {Dim::tokens(), tokens[1]}, c.inputs[0]->dtype);
           },
       .backward =
           [](BackwardContext& b) {
             b.emit("prepend_grad", {b.output_grad()}, {0, 1}, {{"tokens", b.program()[b.input(1)].shape[0].fixed}});
           }});
  set.add({.kind = "prepend_grad", .inputs = {"dy"}, .outputs = {"dx", "dtokens"}, .infer = [](InferContext& c) {
             need_tokens(c, 0);
             const std::int64_t tokens = c.attributes.integer("tokens");
             give(c, 0, {tokens_without(tokens), c.inputs[0]->shape[1]}, c.inputs[0]->dtype);
             give(c, 1, {tokens, c.inputs[0]->shape[1]}, c.inputs[0]->dtype);
           }});

  set.add({.kind = "row_mean",
           .inputs = {"x"},
           .outputs = {"mean"},
           .infer =
               [](InferContext& c) {
                 need_tokens(c, 0);
                 give(c, 0, {Dim::rows(), c.inputs[0]->shape[1]}, c.inputs[0]->dtype);
               },
           .backward = [](BackwardContext& b) { b.emit("row_mean_grad", {b.output_grad()}, {0}, b.op().attributes); }});
  set.add({.kind = "row_mean_grad", .inputs = {"dmean"}, .outputs = {"dx"}, .infer = [](InferContext& c) {
             need_rank(c, 0, 2);
             give(c, 0, {Dim::tokens(), c.inputs[0]->shape[1]}, c.inputs[0]->dtype);
           }});

  set.add({.kind = "class_loss",
           .inputs = {"logits", "labels"},
           .outputs = {"loss", "correct"},
           .infer =
               [](InferContext& c) {
                 need_rank(c, 0, 2);
                 need_vector(c, 1, c.inputs[0]->shape[0]);
                 for (std::size_t i : {0, 1}) give(c, i, c.inputs[1]->shape, DType::f32);
               },
           .backward =
               [](BackwardContext& b) {
                 b.emit("class_loss_grad", {b.output_grad(), b.input(0), b.input(1)}, {0}, b.op().attributes);
               },
           .loss = {.correct = 1}});
  set.add({.kind = "class_loss_grad",
           .inputs = {"dloss", "logits", "labels"},
           .outputs = {"dlogits"},
           .infer = [](InferContext& c) { same(c, 0, 1); },
           .may_overwrite = {{0, 1}}});

  set.add({.kind = "weigh",
           .inputs = {"x", "factors"},
           .outputs = {"y"},
           .infer =
               [](InferContext& c) {
                 need_same(c, 1, 0);
                 for (std::size_t i : {0, 1})
                   if (c.inputs[i]->dtype != DType::f32) c.refuse(i, "f32");
                 same(c, 0, 0);
               },
           .backward =
               [](BackwardContext& b) {
                 b.emit("weigh", {b.output_grad(), b.input(1)}, {0});
               },
           .may_overwrite = {{0, 0}}});
}

}  // namespace quern::ops
