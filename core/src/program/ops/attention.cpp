// Rotary embedding and attention over a packed qkv value: (N, (heads + 2 kv_heads) head_dim), queries, keys, values.
#include "program/ops/ops.h"

namespace quern::ops {

namespace {

void need_packed(const InferContext& c, std::size_t input) {
  std::int64_t width =
      (c.attributes.integer("heads") + 2 * c.attributes.integer("kv_heads")) * c.attributes.integer("head_dim");
  if (c.inputs[input]->shape.size() != 2 || c.inputs[input]->shape[1] != Dim(width))
    c.refuse(input, "(N, " + std::to_string(width) + "): (heads + 2 kv_heads) head_dim");
}

// Two matmuls of N x T x head_dim a head forward, five backward; a causal mask halves them.
Cost attention_cost(const OpInstance& op, double products, const Operand& packed) {
  const Attributes& a = op.attributes;
  double keys = static_cast<double>(op.geometry.sequence) * (a.word("mask") == "causal" ? 0.5 : 1.0);  // of a query
  if (const std::int64_t window = a.integer_or("window", 0); window > 0 && window < op.geometry.sequence)
    keys = static_cast<double>(window) *
           (1 - 0.5 * static_cast<double>(window) / static_cast<double>(op.geometry.sequence));
  double pairs = static_cast<double>(op.geometry.tokens()) * keys;
  Cost cost{.flops = products * 2.0 * pairs * static_cast<double>(a.integer("heads") * a.integer("head_dim")),
            .tensor_core = true,
            .format = packed.dtype};
  for (const Operand& operand : op.inputs) cost.bytes += static_cast<double>(operand.bytes());
  for (const Operand& operand : op.outputs) cost.bytes += static_cast<double>(operand.bytes());
  return cost;
}

}  // namespace

void add_attention(OpSet& set) {
  set.add({.kind = "rope",
           .inputs = {"qkv", "positions"},
           .outputs = {"y"},
           .infer =
               [](InferContext& c) {
                 need_packed(c, 0);
                 if (2 * c.attributes.list("inverse_frequencies").size() !=
                     static_cast<std::size_t>(c.attributes.integer("head_dim")))
                   c.refuse(0, "head_dim / 2 inverse frequencies");
                 same(c, 0, 0);
               },
           .backward =
               [](BackwardContext& b) {
                 b.emit("rope_grad", {b.output_grad(), b.input(1)}, {0}, b.op().attributes);
               },
           .may_overwrite = {{0, 0}}});
  set.add({.kind = "rope_grad",
           .inputs = {"dy", "positions"},
           .outputs = {"dx"},
           .infer = [](InferContext& c) { same(c, 0, 0); },
           .may_overwrite = {{0, 0}}});

  set.add({.kind = "attention",
           .inputs = {"qkv", "documents?"},
           .outputs = {"y", "logsumexp"},
           .infer =
               [](InferContext& c) {
                 need_packed(c, 0);
                 const std::int64_t window = c.attributes.integer_or("window", 0);
                 if (window < 0 || (window > 0 && c.attributes.word("mask") != "causal"))
                   c.refuse(0, "a window of at least one key, with a causal mask");
                 if (c.attributes.real_or("cap", 0) < 0) c.refuse(0, "a cap above 0");
                 Dim tokens = c.inputs[0]->shape[0];
                 give(c, 0, {tokens, Dim(c.attributes.integer("heads") * c.attributes.integer("head_dim"))},
                      c.inputs[0]->dtype);
                 give(c, 1, {tokens, Dim(c.attributes.integer("heads"))}, DType::f32);
               },
           .backward =
               [](BackwardContext& b) {
                 b.emit("attention_grad", {b.output_grad(), b.input(0), b.output(0), b.output(1), b.input(1)}, {0},
                        b.op().attributes);
               },
           .cost = [](const OpInstance& op) { return attention_cost(op, 2, op.inputs[0]); },
           .op_class = OpClass::attention});
  set.add({.kind = "attention_grad",
           .inputs = {"dy", "qkv", "y", "logsumexp", "documents?"},
           .outputs = {"dqkv"},
           .infer = [](InferContext& c) { same(c, 0, 1); },
           .cost =
               [](const OpInstance& op) {
                 Cost cost = attention_cost(op, 5, op.inputs[1]);
                 cost.repeated_flops = cost.flops / 5;  // one of the five matmuls recomputes the scores
                 return cost;
               }});
}

}  // namespace quern::ops
