#include "attention/attention_ranges.h"

#include "primitives/documents.cuh"
#include "runtime/check.h"

namespace quern::cuda {

namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads)
    ranges_kernel(AttentionRanges ranges, const std::int32_t* documents, std::int64_t tokens, std::int64_t sequence,
                  std::int64_t window, bool causal) {
  const std::int64_t token = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (token == 0 && ranges.counter != nullptr) *ranges.counter = 0;
  if (token >= tokens) return;
  const std::int64_t row = token / sequence * sequence;
  const TokenRange document = document_of(documents, tokens, sequence, token);
  TokenRange keys = document, queries = document;
  if (causal) keys.end = token + 1, queries.begin = token;
  if (window > 0) {
    keys.begin = max(keys.begin, token + 1 - window);
    queries.end = min(queries.end, token + window);
  }
  auto of_row = [&](const TokenRange& range) {
    return make_int2(static_cast<int>(range.begin - row), static_cast<int>(range.end - row));
  };
  if (ranges.keys != nullptr) ranges.keys[token] = of_row(keys);
  if (ranges.queries != nullptr) ranges.queries[token] = of_row(queries);
}

}  // namespace

std::size_t attention_range_bytes(const AttentionShape& s) {
  return (static_cast<std::size_t>(s.tokens()) * sizeof(int2) + 255) / 256 * 256;
}

void load_attention_ranges() {
  cudaFuncAttributes attributes;
  QUERN_CUDA(cudaFuncGetAttributes(&attributes, ranges_kernel));
}

void write_attention_ranges(const AttentionShape& s, const std::int32_t* documents, const AttentionRanges& ranges,
                            cudaStream_t stream) {
  const std::int64_t tokens = s.tokens();
  if (tokens == 0) return;
  ranges_kernel<<<static_cast<unsigned>((tokens + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
      ranges, s.documents ? documents : nullptr, tokens, s.sequence, s.window, s.causal);
  QUERN_CUDA(cudaGetLastError());
}

}  // namespace quern::cuda
