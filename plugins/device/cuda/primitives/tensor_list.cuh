#pragma once
// One launch over many tensors: the kernel's arguments list them, each is cut into chunks of a fixed number of
// elements, and blocks take chunks. A small tensor costs a chunk then, not a launch, and what a chunk holds depends on
// sizes alone, so that sums by chunks are the same on every GPU.

#include <cstdint>

#include "runtime/launch.cuh"

namespace quern::cuda {

/// `Tensor` has a `count` of elements. 256 of up to 100 bytes fit the 32764 bytes that arguments may have.
template <class Tensor>
struct TensorList {
  static constexpr int kMost = 256;
  int tensors, chunks;
  std::int32_t first_chunk[kMost];
  Tensor tensor[kMost];
};

/// Elements [begin, end) of one tensor.
struct Chunk {
  int tensor;
  std::int64_t begin, end;
};

template <int kChunk, class Tensor>
__device__ __forceinline__ Chunk chunk_at(const TensorList<Tensor>& list, int chunk) {
  int first = 0, last = list.tensors - 1;  // the last tensor that begins at this chunk or before
  while (first < last) {
    const int middle = (first + last + 1) / 2;
    if (list.first_chunk[middle] <= chunk)
      first = middle;
    else
      last = middle - 1;
  }
  const std::int64_t begin = std::int64_t{chunk - list.first_chunk[first]} * kChunk;
  const std::int64_t count = list.tensor[first].count;
  return {first, begin, count < begin + kChunk ? count : begin + kChunk};
}

/// Calls launch(list) for as many lists as it takes; `tensor(i)` is the i-th of `count`. Empty tensors are left out.
template <int kChunk, class TensorAt, class LaunchList>
void for_tensor_lists(std::size_t count, const TensorAt& tensor, const LaunchList& launch) {
  TensorList<decltype(tensor(std::size_t{}))> list;
  list.tensors = list.chunks = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const auto next = tensor(i);
    if (next.count == 0) continue;
    list.first_chunk[list.tensors] = list.chunks;
    list.tensor[list.tensors++] = next;
    list.chunks += static_cast<int>(ceil_divide(next.count, kChunk));
    if (list.tensors < list.kMost) continue;
    launch(list);
    list.tensors = list.chunks = 0;
  }
  if (list.tensors > 0) launch(list);
}

}  // namespace quern::cuda
