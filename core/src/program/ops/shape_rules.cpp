#include <utility>

#include "program/ops/ops.h"

namespace quern {

OpSet builtin_ops() {
  OpSet set;
  ops::add_embedding(set);
  ops::add_linear(set);
  ops::add_quantize(set);
  ops::add_weight_formats(set);
  ops::add_norms(set);
  ops::add_attention(set);
  ops::add_elementwise(set);
  ops::add_loss(set);
  ops::add_token_rows(set);
  ops::add_reduction(set);
  ops::add_optimizer(set);
  return set;
}

namespace ops {

void same(InferContext& c, std::size_t output, std::size_t input) {
  give(c, output, c.inputs[input]->shape, c.inputs[input]->dtype);
}

void give(InferContext& c, std::size_t output, Shape shape, DType dtype) {
  c.outputs[output].shape = std::move(shape);
  c.outputs[output].dtype = dtype;
}

void need_rank(const InferContext& c, std::size_t input, std::size_t rank) {
  if (c.inputs[input]->shape.size() != rank) c.refuse(input, std::to_string(rank) + " dimensions");
}

void need_vector(const InferContext& c, std::size_t input, Dim size) {
  if (c.inputs[input]->shape != Shape{size}) c.refuse(input, to_string(Shape{size}));
}

void need_same(const InferContext& c, std::size_t i, std::size_t j) {
  if (c.inputs[i]->shape != c.inputs[j]->shape) c.refuse(i, to_string(c.inputs[j]->shape));
}

}  // namespace ops
}  // namespace quern
