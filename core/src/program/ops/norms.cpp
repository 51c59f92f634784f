// Norms over the last dimension. What the backward reads besides its gradient: the input and the row statistics, never
// the output.
#include "program/ops/ops.h"

namespace quern::ops {

namespace {

void add_rms_norm(OpSet& set) {
  set.add({.kind = "rms_norm",
           .inputs = {"x", "weight"},
           .outputs = {"y", "rstd"},
           .infer =
               [](InferContext& c) {
                 need_rank(c, 0, 2);
                 need_vector(c, 1, c.inputs[0]->shape[1]);
                 same(c, 0, 0);
                 give(c, 1, {c.inputs[0]->shape[0]}, DType::f32);
               },
           .backward =
               [](BackwardContext& b) {
                 b.emit("rms_norm_grad", {b.output_grad(), b.input(0), b.input(1), b.output(1)}, {0, 1});
               },
           .may_overwrite = {{0, 0}},
           .op_class = OpClass::norm});
  set.add({.kind = "rms_norm_grad",
           .inputs = {"dy", "x", "weight", "rstd"},
           .outputs = {"dx", "dweight"},
           .infer =
               [](InferContext& c) {
                 same(c, 0, 0);
                 same(c, 1, 2);
               },
           .may_overwrite = {{0, 0}}});
}

void add_layer_norm(OpSet& set) {
  set.add(
      {.kind = "layer_norm",
       .inputs = {"x", "weight", "bias"},
       .outputs = {"y", "mean", "rstd"},
       .infer =
           [](InferContext& c) {
             need_rank(c, 0, 2);
             need_vector(c, 1, c.inputs[0]->shape[1]);
             need_vector(c, 2, c.inputs[0]->shape[1]);
             same(c, 0, 0);
             give(c, 1, {c.inputs[0]->shape[0]}, DType::f32);
             give(c, 2, {c.inputs[0]->shape[0]}, DType::f32);
           },
       .backward =
           [](BackwardContext& b) {
             // The bias is an operand of the gradient op only through its own gradient's shape, the weight's.
             b.emit("layer_norm_grad", {b.output_grad(), b.input(0), b.input(1), b.output(1), b.output(2)}, {0, 1, 2});
           },
       .may_overwrite = {{0, 0}},
       .op_class = OpClass::norm});
  set.add({.kind = "layer_norm_grad",
           .inputs = {"dy", "x", "weight", "mean", "rstd"},
           .outputs = {"dx", "dweight", "dbias"},
           .infer =
               [](InferContext& c) {
                 same(c, 0, 0);
                 same(c, 1, 2);
                 same(c, 2, 2);
               },
           .may_overwrite = {{0, 0}}});
}

// RMS norm of queries and keys of a packed qkv value: of every head, or ("over" is "width") of all heads together, as
// the weights' sizes say; value heads pass through.
void add_head_norm(OpSet& set) {
  set.add({.kind = "head_norm",
           .inputs = {"qkv", "query_weight", "key_weight"},
           .outputs = {"y", "rstd"},
           .infer =
               [](InferContext& c) {
                 auto heads = c.attributes.integer("heads"), kv_heads = c.attributes.integer("kv_heads"),
                      size = c.attributes.integer("head_dim");
                 if (c.inputs[0]->shape.size() != 2 || c.inputs[0]->shape[1] != Dim((heads + 2 * kv_heads) * size))
                   c.refuse(0, "(N, (heads + 2 kv_heads) head_dim)");
                 const bool width = c.attributes.has("over");
                 need_vector(c, 1, width ? heads * size : size);
                 need_vector(c, 2, width ? kv_heads * size : size);
                 same(c, 0, 0);
                 give(c, 1, {c.inputs[0]->shape[0], Dim(width ? 2 : heads + kv_heads)}, DType::f32);
               },
           .backward =
               [](BackwardContext& b) {
                 b.emit("head_norm_grad", {b.output_grad(), b.input(0), b.input(1), b.input(2), b.output(1)}, {0, 1, 2},
                        b.op().attributes);
               },
           .may_overwrite = {{0, 0}}});
  set.add({.kind = "head_norm_grad",
           .inputs = {"dy", "qkv", "query_weight", "key_weight", "rstd"},
           .outputs = {"dqkv", "dquery_weight", "dkey_weight"},
           .infer =
               [](InferContext& c) {
                 same(c, 0, 0);
                 same(c, 1, 2);
                 same(c, 2, 3);
               },
           .may_overwrite = {{0, 0}}});
}

}  // namespace

void add_norms(OpSet& set) {
  add_rms_norm(set);
  add_layer_norm(set);
  add_head_norm(set);
}

}  // namespace quern::ops
