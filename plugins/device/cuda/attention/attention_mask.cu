#include "attention/attention_mask.h"

#include <cuda_bf16.h>

#include "primitives/documents.cuh"
#include "runtime/check.h"

namespace quern::cuda {

namespace {

constexpr int kThreads = 256;

// Finite: where all of a tile is masked, the running maximum of the scores must not become infinite.
constexpr float kMasked = -1e30f;

/// A block writes the keys of one query.
__global__ void __launch_bounds__(kThreads)
    mask_kernel(__nv_bfloat16* mask, const std::int32_t* documents, std::int64_t tokens, std::int64_t sequence,
                std::int64_t window, std::int64_t first_row) {
  const std::int64_t query = blockIdx.x, first_token = first_row * sequence;
  const std::int64_t row = first_token + query / sequence * sequence;
  TokenRange range = document_of(documents, tokens, sequence, first_token + query);
  if (window > 0) range.begin = max(range.begin, first_token + query + 1 - window);
  for (std::int64_t key = threadIdx.x; key < sequence; key += kThreads) {
    const bool same = row + key >= range.begin && row + key < range.end;
    mask[query * sequence + key] = __float2bfloat16(same ? 0.0f : kMasked);
  }
}

}  // namespace

void write_attention_mask(void* mask, const AttentionShape& s, const std::int32_t* documents, std::int64_t first_row,
                          std::int64_t rows, cudaStream_t stream) {
  if (rows * s.sequence == 0) return;
  mask_kernel<<<static_cast<unsigned>(rows * s.sequence), kThreads, 0, stream>>>(
      static_cast<__nv_bfloat16*>(mask), documents, s.tokens(), s.sequence, s.window, first_row);
  QUERN_CUDA(cudaGetLastError());
}

}  // namespace quern::cuda
