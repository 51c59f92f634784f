// Attention by own kernels, for what cuDNN does not take: fp32, odd head sizes, short sequences, some document masks. A
// warp owns a row of results and walks over what it attends to, so sums have a fixed order; simple rather than fast.

#include <algorithm>

#include "attention/attention.h"
#include "primitives/documents.cuh"
#include "primitives/element.cuh"
#include "runtime/check.h"

namespace quern::cuda {

namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 128;
constexpr int kAtOnce = 4;  ///< keys or queries whose scores are reduced together, to hide latency

/// What kernels need of a shape, and the operands.
struct Arguments {
  const void *qkv, *y, *dy;
  void *out, *dqkv;
  float *logsumexp, *delta;  ///< (B, heads, S)
  const std::int32_t* documents;
  std::int64_t tokens, sequence, heads, kv_heads, head_dim, window;
  float scale, cap;
  bool causal;

  __device__ std::int64_t packed() const { return (heads + 2 * kv_heads) * head_dim; }
  __device__ std::int64_t group() const { return heads / kv_heads; }
  __device__ std::int64_t query_at(std::int64_t token, std::int64_t head) const {
    return token * packed() + head * head_dim;
  }
  __device__ std::int64_t key_at(std::int64_t token, std::int64_t kv_head) const {
    return token * packed() + (heads + kv_head) * head_dim;
  }
  __device__ std::int64_t value_at(std::int64_t token, std::int64_t kv_head) const {
    return token * packed() + (heads + kv_heads + kv_head) * head_dim;
  }
  __device__ std::int64_t out_at(std::int64_t token, std::int64_t head) const {
    return (token * heads + head) * head_dim;
  }
  /// In logsumexp and delta.
  __device__ std::int64_t stat_at(std::int64_t token, std::int64_t head) const {
    return (token / sequence * heads + head) * sequence + token % sequence;
  }
};

/// Keys that a query sees.
__device__ TokenRange keys_of(const Arguments& a, std::int64_t token) {
  TokenRange range = document_of(a.documents, a.tokens, a.sequence, token);
  if (a.causal) range.end = token + 1;
  if (a.window > 0) range.begin = max(range.begin, token + 1 - a.window);
  return range;
}

/// Queries that see a key.
__device__ TokenRange queries_of(const Arguments& a, std::int64_t token) {
  TokenRange range = document_of(a.documents, a.tokens, a.sequence, token);
  if (a.causal) range.begin = token;
  if (a.window > 0) range.end = min(range.end, token + a.window);
  return range;
}

/// A score from q k^T, and by how much it grows with it.
struct Score {
  float value, slope;
};
__device__ __forceinline__ Score score_of(const Arguments& a, float dot) {
  const float scaled = dot * a.scale;
  if (a.cap == 0) return {scaled, a.scale};
  const float bent = tanhf(scaled / a.cap);
  return {a.cap * bent, (1.0f - bent * bent) * a.scale};
}

/// A head's vector, spread over a warp: lane l has elements l, l + 32, ...; those from head_dim on are zero.
template <int kParts>
struct Vector {
  float at[kParts] = {};
};

template <class T, int kParts>
__device__ __forceinline__ Vector<kParts> load(const void* memory, std::int64_t offset, std::int64_t size) {
  const T* from = static_cast<const T*>(memory) + offset;
  Vector<kParts> vector;
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const int d = threadIdx.x % kWarp + i * kWarp;
    if (d < size) vector.at[i] = to_float(from[d]);
  }
  return vector;
}

template <class T, int kParts>
__device__ __forceinline__ void store(void* memory, std::int64_t offset, std::int64_t size,
                                      const Vector<kParts>& vector, float factor) {
  T* to = static_cast<T*>(memory) + offset;
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const int d = threadIdx.x % kWarp + i * kWarp;
    if (d < size) to[d] = from_float<T>(vector.at[i] * factor);
  }
}

template <int kParts>
__device__ __forceinline__ float dot(const Vector<kParts>& a, const Vector<kParts>& b) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kParts; ++i) sum += a.at[i] * b.at[i];
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  return sum;
}

template <int kParts>
__device__ __forceinline__ void add_scaled(Vector<kParts>& sum, float factor, const Vector<kParts>& x) {
#pragma unroll
  for (int i = 0; i < kParts; ++i) sum.at[i] += factor * x.at[i];
}

/// Calls body(token, head) for every token and head, a warp each.
template <class Body>
__device__ __forceinline__ void for_each_row(std::int64_t tokens, std::int64_t heads, Body body) {
  const std::int64_t warps = std::int64_t{gridDim.x} * (blockDim.x / kWarp);
  for (std::int64_t i = (blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x) / kWarp; i < tokens * heads; i += warps)
    body(i / heads, i % heads);
}

template <class T, int kParts>
__global__ void __launch_bounds__(kThreads) forward_kernel(const Arguments a) {
  for_each_row(a.tokens, a.heads, [&](std::int64_t token, std::int64_t head) {
    const auto [begin, end] = keys_of(a, token);
    const std::int64_t kv_head = head / a.group();
    const auto q = load<T, kParts>(a.qkv, a.query_at(token, head), a.head_dim);
    Vector<kParts> sums;
    float maximum = -INFINITY, total = 0;
    for (std::int64_t first = begin; first < end; first += kAtOnce) {
      float scores[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const std::int64_t key = min(first + i, end - 1);
        scores[i] = score_of(a, dot(q, load<T, kParts>(a.qkv, a.key_at(key, kv_head), a.head_dim))).value;
        if (first + i >= end) scores[i] = -INFINITY;
      }
      float larger = maximum;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) larger = fmaxf(larger, scores[i]);
      const float correction = expf(maximum - larger);  // the first time 0
      maximum = larger;
      total *= correction;
#pragma unroll
      for (int i = 0; i < kParts; ++i) sums.at[i] *= correction;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float p = expf(scores[i] - maximum);
        total += p;
        const std::int64_t key = min(first + i, end - 1);
        add_scaled(sums, p, load<T, kParts>(a.qkv, a.value_at(key, kv_head), a.head_dim));
      }
    }
    store<T>(a.out, a.out_at(token, head), a.head_dim, sums, 1.0f / total);
    if (a.logsumexp != nullptr && threadIdx.x % kWarp == 0) a.logsumexp[a.stat_at(token, head)] = maximum + logf(total);
  });
}

/// delta = sum of dy * y over a head: what the softmax's normalisation takes from every key's gradient.
template <class T, int kParts>
__global__ void __launch_bounds__(kThreads) delta_kernel(const Arguments a) {
  for_each_row(a.tokens, a.heads, [&](std::int64_t token, std::int64_t head) {
    const std::int64_t at = a.out_at(token, head);
    const float delta = dot(load<T, kParts>(a.y, at, a.head_dim), load<T, kParts>(a.dy, at, a.head_dim));
    if (threadIdx.x % kWarp == 0) a.delta[a.stat_at(token, head)] = delta;
  });
}

template <class T, int kParts>
__global__ void __launch_bounds__(kThreads) query_grad_kernel(const Arguments a) {
  for_each_row(a.tokens, a.heads, [&](std::int64_t token, std::int64_t head) {
    const auto [begin, end] = keys_of(a, token);
    const std::int64_t kv_head = head / a.group();
    const auto q = load<T, kParts>(a.qkv, a.query_at(token, head), a.head_dim);
    const auto dy = load<T, kParts>(a.dy, a.out_at(token, head), a.head_dim);
    const float logsumexp = a.logsumexp[a.stat_at(token, head)], delta = a.delta[a.stat_at(token, head)];
    Vector<kParts> dq;
#pragma unroll 2
    for (std::int64_t key = begin; key < end; ++key) {
      const auto k = load<T, kParts>(a.qkv, a.key_at(key, kv_head), a.head_dim);
      const auto v = load<T, kParts>(a.qkv, a.value_at(key, kv_head), a.head_dim);
      const Score score = score_of(a, dot(q, k));
      const float p = expf(score.value - logsumexp);
      add_scaled(dq, p * (dot(dy, v) - delta) * score.slope, k);
    }
    store<T>(a.dqkv, a.query_at(token, head), a.head_dim, dq, 1.0f);
  });
}

template <class T, int kParts>
__global__ void __launch_bounds__(kThreads) key_grad_kernel(const Arguments a) {
  for_each_row(a.tokens, a.kv_heads, [&](std::int64_t token, std::int64_t kv_head) {
    const auto [begin, end] = queries_of(a, token);
    const auto k = load<T, kParts>(a.qkv, a.key_at(token, kv_head), a.head_dim);
    const auto v = load<T, kParts>(a.qkv, a.value_at(token, kv_head), a.head_dim);
    Vector<kParts> dk, dv;
    for (std::int64_t head = kv_head * a.group(); head < (kv_head + 1) * a.group(); ++head) {
#pragma unroll 2
      for (std::int64_t query = begin; query < end; ++query) {
        const auto q = load<T, kParts>(a.qkv, a.query_at(query, head), a.head_dim);
        const auto dy = load<T, kParts>(a.dy, a.out_at(query, head), a.head_dim);
        const std::int64_t stat = a.stat_at(query, head);
        const Score score = score_of(a, dot(q, k));
        const float p = expf(score.value - a.logsumexp[stat]);
        add_scaled(dv, p, dy);
        add_scaled(dk, p * (dot(dy, v) - a.delta[stat]) * score.slope, q);
      }
    }
    store<T>(a.dqkv, a.key_at(token, kv_head), a.head_dim, dk, 1.0f);
    store<T>(a.dqkv, a.value_at(token, kv_head), a.head_dim, dv, 1.0f);
  });
}

Arguments arguments_of(const AttentionShape& s, const AttentionOperands& o) {
  return {.qkv = o.qkv,
          .y = o.y,
          .dy = o.dy,
          .out = o.y,
          .dqkv = o.dqkv,
          .logsumexp = o.logsumexp,
          .delta = static_cast<float*>(o.workspace),
          .documents = o.documents,
          .tokens = s.tokens(),
          .sequence = s.sequence,
          .heads = s.heads,
          .kv_heads = s.kv_heads,
          .head_dim = s.head_dim,
          .window = s.window,
          .scale = s.scale,
          .cap = s.cap,
          .causal = s.causal};
}

/// Calls f.operator()<T, kParts>() for the shape's element type and the registers a lane needs.
template <class F>
void with_vector(const AttentionShape& s, F&& f) {
  with_element(s.dtype, [&](auto element) {
    using T = decltype(element);
    if (s.head_dim <= 2 * kWarp) return f.template operator()<T, 2>();
    if (s.head_dim <= 4 * kWarp) return f.template operator()<T, 4>();
    return f.template operator()<T, kOwnLargestHead / kWarp>();
  });
}

unsigned blocks_for(std::int64_t rows) {
  constexpr std::int64_t kRows = kThreads / kWarp;
  return static_cast<unsigned>(std::min<std::int64_t>((rows + kRows - 1) / kRows, std::int64_t{1} << 30));
}

}  // namespace

std::size_t own_attention_grad_workspace(const AttentionShape& shape) {
  return (static_cast<std::size_t>(shape.tokens() * shape.heads) * sizeof(float) + 255) / 256 * 256;
}

void own_attention(const AttentionShape& shape, const AttentionOperands& operands, cudaStream_t stream) {
  if (shape.tokens() == 0) return;
  const Arguments arguments = arguments_of(shape, operands);
  with_vector(shape, [&]<class T, int kParts>() {
    forward_kernel<T, kParts><<<blocks_for(shape.tokens() * shape.heads), kThreads, 0, stream>>>(arguments);
  });
  QUERN_CUDA(cudaGetLastError());
}

void own_attention_grad(const AttentionShape& shape, const AttentionOperands& operands, cudaStream_t stream) {
  if (shape.tokens() == 0) return;
  const Arguments arguments = arguments_of(shape, operands);
  const unsigned queries = blocks_for(shape.tokens() * shape.heads), keys = blocks_for(shape.tokens() * shape.kv_heads);
  with_vector(shape, [&]<class T, int kParts>() {
    delta_kernel<T, kParts><<<queries, kThreads, 0, stream>>>(arguments);
    QUERN_CUDA(cudaGetLastError());
    query_grad_kernel<T, kParts><<<queries, kThreads, 0, stream>>>(arguments);
    QUERN_CUDA(cudaGetLastError());
    key_grad_kernel<T, kParts><<<keys, kThreads, 0, stream>>>(arguments);
  });
  QUERN_CUDA(cudaGetLastError());
}

}  // namespace quern::cuda
