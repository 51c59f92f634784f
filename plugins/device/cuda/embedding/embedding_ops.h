#pragma once
// embedding and its gradient, one source each; add_embedding_ops of kernels.h adds both.

#include "primitives/vector.cuh"
#include "runtime/kernels.h"

namespace quern::cuda {

void add_embedding_grad_op(OpTable& table);

/// Rows of `columns` elements of T at these addresses can be moved by packs.
template <class T>
bool packed_rows(std::int64_t columns, std::initializer_list<const void*> pointers) {
  return columns % kPack<T> == 0 && aligned_16(pointers);
}

}  // namespace quern::cuda
