// embedding: y[n] = table[token[n]], and its gradient: rows of dy summed by token. The gradient sorts positions by
// token, stably, and sums each token's rows in an order that its count alone fixes: the same bits every time.

#include <algorithm>
#include <string>

#include "check.h"
#include "kernels.h"
#include "operand_check.h"
#include "vector.cuh"

namespace quern::cuda {

namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kFewPositions = 16;  ///< tokens that occur more often get a whole block

__device__ __forceinline__ std::int64_t warp_index() {
  return (blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x) / kWarp;
}
__device__ __forceinline__ std::int64_t warp_count() { return std::int64_t{gridDim.x} * blockDim.x / kWarp; }

// ---- forward ----

/// A warp a row. An id outside the table gives NaN, which the run's finite check reports.
template <class T, Access kAccess>
__global__ void embed_kernel(const int* __restrict__ tokens, const T* __restrict__ table, T* __restrict__ y,
                             std::int64_t count, std::int64_t vocabulary, std::int64_t columns) {
  const int lane = threadIdx.x % kWarp;
  for (std::int64_t n = warp_index(); n < count; n += warp_count()) {
    const int token = tokens[n];
    const bool known = token >= 0 && token < vocabulary;
    Floats<T> nan;
#pragma unroll
    for (float& value : nan.at) value = __int_as_float(0x7fc00000);
    for (std::int64_t at = lane * kPack<T>; at < columns; at += kWarp * kPack<T>) {
      Pack<T> pack = known ? load_pack<kAccess>(table + token * columns, at, columns) : round_pack(nan);
      store_pack<kAccess>(y + n * columns, at, columns, pack);
    }
  }
}

/// Rows of `columns` elements of T at these addresses can be moved by packs.
template <class T>
bool packed_rows(std::int64_t columns, std::initializer_list<const void*> pointers) {
  return columns % kPack<T> == 0 && aligned_16(pointers);
}

void embed(std::span<const View> inputs, std::span<const View> outputs, const Exec& exec) {
  const View &tokens = inputs[0], &table = inputs[1], &y = outputs[0];
  const std::int64_t count = tokens.count(), columns = table.columns();
  if (count == 0 || columns == 0) return;
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>((count + kWarps - 1) / kWarps, 1 << 16));
  with_element(y.dtype, [&](auto element) {
    using T = decltype(element);
    auto* kernel = packed_rows<T>(columns, {table.data, y.data}) ? embed_kernel<T, Access::vector>
                                                                 : embed_kernel<T, Access::scalar>;
    kernel<<<blocks, kThreads, 0, stream_of(exec)>>>(tokens.as<const int>(), table.as<const T>(), y.as<T>(), count,
                                                     table.extents[0], columns);
  });
  QUERN_CUDA(cudaGetLastError());
}

OpSupport query_embed(const OpInstance& op, const CudaTraits&) {
  std::int64_t count = element_count(extents_of(op, 0));
  Extents table = extents_of(op, 1);
  if (table.size() != 2) return {"embedding: the table must be a matrix", 0};
  return OperandCheck(op, 2, 1, 1)
      .input(0, "tokens", extents_of(op, 0), DType::i32)
      .input(1, "table", table)
      .output(0, "y", {count, table[1]})
      .support();
}

// ---- gradient: sorting ----

/// Positions sorted by token, those of one token ascending: token v is at order[first[v]] up to order[first[v + 1]].
struct Buckets {
  int* first;  // (V + 1)
  int* order;  // (N)
};

__device__ __forceinline__ bool in_table(int token, std::int64_t vocabulary) {
  return token >= 0 && token < vocabulary;
}

/// first[v + 1] = how often v occurs; zeroed before. Integer sums do not depend on their order.
__global__ void count_kernel(const int* __restrict__ tokens, int count, std::int64_t vocabulary, int* first) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    if (in_table(tokens[i], vocabulary)) atomicAdd(&first[tokens[i] + 1], 1);
}

/// Counts become sums of all counts up to here; one block of 1024 threads.
__global__ void scan_kernel(int* values, std::int64_t count) {
  __shared__ int warp_sums[32];
  __shared__ int carry;
  if (threadIdx.x == 0) carry = 0;
  __syncthreads();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  for (std::int64_t begin = 0; begin < count; begin += 4 * 1024) {
    const std::int64_t at = begin + 4 * threadIdx.x;
    int part[4], sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) part[i] = sum += at + i < count ? values[at + i] : 0;
    int inclusive = sum;
    for (int offset = 1; offset < kWarp; offset *= 2) {
      int before = __shfl_up_sync(~0u, inclusive, offset);
      if (lane >= offset) inclusive += before;
    }
    if (lane == kWarp - 1) warp_sums[warp] = inclusive;
    __syncthreads();
    if (warp == 0) {
      int total = warp_sums[lane];
      for (int offset = 1; offset < kWarp; offset *= 2) {
        int before = __shfl_up_sync(~0u, total, offset);
        if (lane >= offset) total += before;
      }
      warp_sums[lane] = total;
    }
    __syncthreads();
    const int before = carry + (warp > 0 ? warp_sums[warp - 1] : 0) + inclusive - sum;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (at + i < count) values[at + i] = before + part[i];
    __syncthreads();
    if (threadIdx.x == 0) carry += warp_sums[31];
    __syncthreads();
  }
}

/// Each position counts the earlier ones of its token: N^2 / 2 comparisons of cached integers, tens of microseconds at
/// 32k tokens, and stable without a sort.
__global__ void place_kernel(const int* __restrict__ tokens, int count, std::int64_t vocabulary, Buckets buckets) {
  __shared__ int4 tile[kThreads / 4];
  auto* one = reinterpret_cast<int*>(tile);
  const int position = blockIdx.x * kThreads + threadIdx.x;
  const int token = position < count ? tokens[position] : -1;
  int rank = 0;
  for (int begin = 0; begin < blockIdx.x * kThreads; begin += kThreads) {  // whole tiles before this block's own
    one[threadIdx.x] = tokens[begin + threadIdx.x];
    __syncthreads();
#pragma unroll 8
    for (int i = 0; i < kThreads / 4; ++i) {
      const int4 other = tile[i];
      rank += (other.x == token) + (other.y == token) + (other.z == token) + (other.w == token);
    }
    __syncthreads();
  }
  one[threadIdx.x] = token;
  __syncthreads();
  for (int i = 0; i < threadIdx.x; ++i) rank += one[i] == token;
  if (position < count && in_table(token, vocabulary)) buckets.order[buckets.first[token] + rank] = position;
}

// ---- gradient: sums ----

/// Elements of T that are as many as a pack of another type: dy's packs decide, dtable's are read in parts.
template <class T, class Out, Access kAccess>
__device__ __forceinline__ void store_sum(Out* row, std::int64_t at, std::int64_t columns, const Floats<T>& sum,
                                          bool add) {
  constexpr int kParts = kPack < T >> kPack<Out> ? kPack<T> / kPack<Out> : 1;
  if constexpr (kPack < Out >> kPack<T>) {  // fp32 sums into bf16: half a pack, element by element
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) {
      if (at + i < columns) row[at + i] = from_float<Out>(add ? to_float(row[at + i]) + sum.at[i] : sum.at[i]);
    }
  } else {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const std::int64_t from = at + part * kPack<Out>;
      Floats<Out> values{};
      if (add) values = unpack(load_pack<kAccess>(row, from, columns));
#pragma unroll
      for (int i = 0; i < kPack<Out>; ++i)
        values.at[i] = add ? values.at[i] + sum.at[part * kPack<Out> + i] : sum.at[part * kPack<Out> + i];
      store_pack<kAccess>(row, from, columns, round_pack(values));
    }
  }
}

template <class T, Access kAccess>
__device__ __forceinline__ void add_row(Floats<T>& sum, const T* row, std::int64_t at, std::int64_t columns) {
  const Floats<T> values = unpack(load_pack<kAccess>(row, at, columns));
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) sum.at[i] += values.at[i];
}

/// Tokens that occur at most kFewPositions times, a warp a vocabulary row. Rows without a token become zero unless
/// added to.
template <class T, class Out, Access kAccess>
__global__ void sum_few_kernel(const T* __restrict__ dy, Buckets buckets, Out* __restrict__ dtable,
                               std::int64_t vocabulary, std::int64_t columns, bool add) {
  const int lane = threadIdx.x % kWarp;
  for (std::int64_t v = warp_index(); v < vocabulary; v += warp_count()) {
    const int begin = buckets.first[v], end = buckets.first[v + 1];
    if (end - begin > kFewPositions || (add && begin == end)) continue;
    for (std::int64_t at = lane * kPack<T>; at < columns; at += kWarp * kPack<T>) {
      Floats<T> sum{};
      for (int i = begin; i < end; ++i) add_row<T, kAccess>(sum, dy + buckets.order[i] * columns, at, columns);
      store_sum<T, Out, kAccess>(dtable + v * columns, at, columns, sum, add);
    }
  }
}

/// Frequent tokens, a block each: warp w sums positions w, w + 8, ...; the warps' sums are added in order. Blocks look
/// for frequent tokens among rows spread over the vocabulary, because those cluster at low ids.
template <class T, class Out, Access kAccess>
__global__ void sum_many_kernel(const T* __restrict__ dy, Buckets buckets, Out* __restrict__ dtable,
                                std::int64_t vocabulary, std::int64_t columns, bool add) {
  __shared__ Floats<T> parts[kWarps][kWarp];
  __shared__ std::int64_t rows[kThreads];
  __shared__ int found;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  for (std::int64_t base = blockIdx.x; base < vocabulary; base += std::int64_t{gridDim.x} * kThreads) {
    if (threadIdx.x == 0) found = 0;
    __syncthreads();
    const std::int64_t mine = base + std::int64_t{gridDim.x} * threadIdx.x;
    if (mine < vocabulary && buckets.first[mine + 1] - buckets.first[mine] > kFewPositions)
      rows[atomicAdd(&found, 1)] = mine;  // the order in which rows are taken changes no sum
    __syncthreads();
    for (int r = 0; r < found; ++r) {
      const std::int64_t v = rows[r];
      const int begin = buckets.first[v], end = buckets.first[v + 1];
      for (std::int64_t chunk = 0; chunk < columns; chunk += kWarp * kPack<T>) {
        const std::int64_t at = chunk + lane * kPack<T>;
        Floats<T> sum{};
#pragma unroll 4
        for (int i = begin + warp; i < end; i += kWarps)
          add_row<T, kAccess>(sum, dy + buckets.order[i] * columns, at, columns);
        parts[warp][lane] = sum;
        __syncthreads();
        if (warp == 0) {
          for (int w = 1; w < kWarps; ++w) {
#pragma unroll
            for (int i = 0; i < kPack<T>; ++i) sum.at[i] += parts[w][lane].at[i];
          }
          store_sum<T, Out, kAccess>(dtable + v * columns, at, columns, sum, add);
        }
        __syncthreads();
      }
    }
    __syncthreads();
  }
}

struct GradShape {
  std::int64_t count = 0, vocabulary = 0, columns = 0;
  bool add = false;
  int multiprocessors = 0;
  std::size_t first_bytes() const { return (static_cast<std::size_t>(vocabulary) + 1 + 63) / 64 * 256; }
  std::size_t order_bytes() const { return (static_cast<std::size_t>(count) + 63) / 64 * 256; }
};

void embedding_grad(const GradShape& shape, std::span<const View> inputs, std::span<const View> outputs,
                    const Exec& exec) {
  const View &dy = inputs[0], &tokens = inputs[1], &dtable = outputs[0];
  if (shape.vocabulary == 0 || shape.columns == 0) return;
  cudaStream_t stream = stream_of(exec);
  const int count = static_cast<int>(shape.count);
  Buckets buckets{static_cast<int*>(exec.workspace),
                  reinterpret_cast<int*>(static_cast<char*>(exec.workspace) + shape.first_bytes())};
  QUERN_CUDA(cudaMemsetAsync(buckets.first, 0, shape.first_bytes(), stream));
  const unsigned blocks = static_cast<unsigned>((count + kThreads - 1) / kThreads);
  if (count > 0) {
    count_kernel<<<blocks, kThreads, 0, stream>>>(tokens.as<const int>(), count, shape.vocabulary, buckets.first);
    QUERN_CUDA(cudaGetLastError());
    scan_kernel<<<1, 1024, 0, stream>>>(buckets.first, shape.vocabulary + 1);
    QUERN_CUDA(cudaGetLastError());
    place_kernel<<<blocks, kThreads, 0, stream>>>(tokens.as<const int>(), count, shape.vocabulary, buckets);
    QUERN_CUDA(cudaGetLastError());
  }
  const auto resident = static_cast<unsigned>(shape.multiprocessors * 8);
  with_element(dy.dtype, [&](auto element) {
    with_element(dtable.dtype, [&](auto sum) {
      using T = decltype(element);
      using Out = decltype(sum);
      auto run = [&]<Access kAccess>() {
        sum_few_kernel<T, Out, kAccess><<<resident, kThreads, 0, stream>>>(dy.as<const T>(), buckets, dtable.as<Out>(),
                                                                           shape.vocabulary, shape.columns, shape.add);
        QUERN_CUDA(cudaGetLastError());
        sum_many_kernel<T, Out, kAccess><<<resident, kThreads, 0, stream>>>(dy.as<const T>(), buckets, dtable.as<Out>(),
                                                                            shape.vocabulary, shape.columns, shape.add);
        QUERN_CUDA(cudaGetLastError());
      };
      bool packed = packed_rows<T>(shape.columns, {dy.data, dtable.data}) && shape.columns % kPack<Out> == 0;
      packed ? run.template operator()<Access::vector>() : run.template operator()<Access::scalar>();
    });
  });
}

GradShape grad_shape(const OpInstance& op, int multiprocessors) {
  return {element_count(op.inputs[1].extents), op.outputs[0].extents[0], op.outputs[0].extents[1],
          op.outputs[0].accumulate, multiprocessors};
}

OpSupport query_grad(const OpInstance& op, const CudaTraits& gpu) {
  std::int64_t count = element_count(extents_of(op, 1));
  if (op.outputs.size() != 1 || op.outputs[0].extents.size() != 2)
    return {"embedding_grad: dtable must be a matrix", 0};
  const Extents& table = op.outputs[0].extents;
  OperandCheck check(op, 2, 1);
  check.input(0, "dy", {count, table[1]})
      .input(1, "tokens", extents_of(op, 1), DType::i32)
      .sum(0, "dtable", table)
      .that(count < (std::int64_t{1} << 30), "takes fewer than 2^30 tokens");
  if (!check.ok()) return check.support();
  GradShape shape = grad_shape(op, gpu.multiprocessors);
  return check.support(shape.first_bytes() + shape.order_bytes());
}

}  // namespace

void add_embedding_ops(OpTable& table) {
  table["embedding"] = {[](const OpInstance&, CudaContext&) { return Launch(embed); }, query_embed};
  table["embedding_grad"] = {[](const OpInstance& op, CudaContext& context) -> Launch {
                               return [shape = grad_shape(op, context.multiprocessors)](
                                          std::span<const View> inputs, std::span<const View> outputs,
                                          const Exec& exec) { embedding_grad(shape, inputs, outputs, exec); };
                             },
                             query_grad};
}

}  // namespace quern::cuda
