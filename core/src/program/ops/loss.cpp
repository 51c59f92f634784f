// Language-model loss: LM head and cross-entropy as one region, logits made chunk by chunk and never stored whole.
// In training the region also makes the gradients of its input and of the head's weight. With quantized forms of x and
// the weight, of which _q is row by row, _scale one factor and _t transposed, the matmuls read those, so that the
// weight itself may be absent, and the logits' gradients are rounded to attribute `gradient_format` with the fixed
// scale that fits the gradient seed.
#include "program/ops/ops.h"
#include "quern/step_state.h"

namespace quern::ops {

namespace {

constexpr std::size_t kWeight = 1, kWeightCodes = 6;

/// The input that the matmuls read the weight from.
template <class Inputs, class Has>
std::size_t weight_of(const Inputs& inputs, Has has) {
  return inputs.size() > kWeightCodes && has(inputs[kWeightCodes]) ? kWeightCodes : kWeight;
}

std::size_t weight_of(const InferContext& c) {
  return weight_of(c.inputs, [](const Value* value) { return value != nullptr; });
}

void infer_loss(InferContext& c) {
  const std::size_t weight = weight_of(c);
  need_rank(c, 0, 2);
  if (!c.inputs[weight]) c.refuse(weight, "a matrix, or its quantized values");
  need_rank(c, weight, 2);
  if (c.inputs[0]->shape[1] != c.inputs[weight]->shape[1])
    c.refuse(weight, "(vocabulary, " + std::to_string(c.inputs[0]->shape[1].fixed) + ")");
  need_vector(c, 2, c.inputs[0]->shape[0]);
  give(c, 0, {c.inputs[0]->shape[0]}, DType::f32);
}

Cost loss_cost(const OpInstance& op, double products) {
  const Operand& x = op.inputs[0];
  const Operand& weight = op.inputs[weight_of(op.inputs, [](const Operand& operand) { return operand.present; })];
  Cost cost{
      .flops = products * 2.0 * static_cast<double>(element_count(x.extents)) * static_cast<double>(weight.extents[0]),
      .tensor_core = true,
      .format = op.inputs.size() > 3 && op.inputs[3].present ? op.inputs[3].dtype : x.dtype};
  for (const Operand& operand : op.inputs) cost.bytes += static_cast<double>(operand.bytes());
  for (const Operand& operand : op.outputs) cost.bytes += static_cast<double>(operand.bytes());
  // The logits are written once and, in training, rewritten as their gradient and read by two matmuls.
  cost.bytes += static_cast<double>(x.extents[0] * weight.extents[0]) * static_cast<double>(size_of(x.dtype)) *
                (products > 1 ? 5 : 2);
  return cost;
}

}  // namespace

void add_loss(OpSet& set) {
  set.add({.kind = "lm_loss",
           .inputs = {"x", "weight?", "targets", "x_q?", "x_scale?", "x_t?", "weight_q?", "weight_scale?", "weight_t?"},
           .outputs = {"token_loss"},
           .infer = infer_loss,
           .cost = [](const OpInstance& op) { return loss_cost(op, 1); },
           .product = Product::loss,
           .training_kind = "lm_loss_train",
           .training_gradients = {{1, 0}, {2, 1}},
           .loss = {.z_loss = true, .chunk = true, .logits = true}});
  set.add({.kind = "lm_loss_train",
           .inputs = {"x", "weight?", "targets", "x_q?", "x_scale?", "x_t?", "weight_q?", "weight_scale?", "weight_t?"},
           .outputs = {"token_loss", "dx", "dweight"},
           .infer =
               [](InferContext& c) {
                 infer_loss(c);
                 same(c, 1, 0);
                 const std::size_t weight = weight_of(c);
                 give(c, 2, c.inputs[weight]->shape, c.inputs[weight == kWeight ? kWeight : 0]->dtype);
               },
           .cost = [](const OpInstance& op) { return loss_cost(op, 3); },
           .product = Product::loss,
           .loss = {.z_loss = true, .chunk = true, .logits = true},
           .quantized_inside = [](const Op& op) -> std::string {
             const bool quantized = op.inputs.size() > 3 && op.inputs[3] != kNoValue;
             return quantized ? "d.logits." + op.attributes.word("gradient_format") : "";
           }});
  // Sums of the step so far: see LossStats.
  set.add({.kind = "loss_stats",
           .inputs = {"loss", "targets", "correct?"},
           .outputs = {"stats"},
           .infer =
               [](InferContext& c) {
                 if (c.inputs[0]->dtype != DType::f32) c.refuse(0, "losses in f32");
                 need_same(c, 0, 1);
                 if (c.inputs.size() > 2 && c.inputs[2]) need_same(c, 2, 0);
                 give(c, 0, {4}, DType::f64);
               },
           .backward =
               [](BackwardContext& c) {
                 const double weight = c.op().attributes.real_or("weight", 1);
                 c.emit("loss_stats_grad", {c.input(1)}, {0}, {{"factor", weight * double{kGradientSeed}}});
               },
           .statistics = true,
           .objective = true});
  set.add({.kind = "loss_stats_grad", .inputs = {"targets"}, .outputs = {"dloss"}, .infer = [](InferContext& c) {
             give(c, 0, c.inputs[0]->shape, DType::f32);
           }});
}

}  // namespace quern::ops
