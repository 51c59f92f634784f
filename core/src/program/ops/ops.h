#pragma once
// The built-in vocabulary, one function a family; each op's shapes, backward, aliasing and cost stand together there.

#include "quern/op_spec.h"

namespace quern::ops {

void add_embedding(OpSet& set);
void add_linear(OpSet& set);    // linear, its matmuls, and the ops they are lowered to
void add_quantize(OpSet& set);  // to 8-bit formats; their scales over time
void add_weight_formats(OpSet& set);
void add_norms(OpSet& set);
void add_attention(OpSet& set);    // rope, attention
void add_elementwise(OpSet& set);  // add, swiglu, gelu, column_sum
void add_loss(OpSet& set);
void add_token_rows(OpSet& set);  // between tokens and rows, losses of rows
void add_reduction(OpSet& set);   // over ranks
void add_optimizer(OpSet& set);   // what an optimizer step is made of

// ---- shape rules that many ops share ----

/// Output i gets the shape and dtype of input j.
void same(InferContext& c, std::size_t output, std::size_t input);
/// Output i gets `shape` and `dtype`.
void give(InferContext& c, std::size_t output, Shape shape, DType dtype);
/// Refuses unless input i has that many dimensions.
void need_rank(const InferContext& c, std::size_t input, std::size_t rank);
/// Refuses unless input i is a vector of `size`.
void need_vector(const InferContext& c, std::size_t input, Dim size);
/// Refuses unless inputs i and j have one shape.
void need_same(const InferContext& c, std::size_t i, std::size_t j);

}  // namespace quern::ops
