// embedding_grad: rows of dy summed by token. Positions are sorted by token, one token's ascending, and each
// token's rows are summed in an order that its count alone fixes: the same bits every time.

#include <algorithm>
#include <string>

#include "embedding/embedding_ops.h"
#include "runtime/check.h"
#include "runtime/launch.cuh"
#include "runtime/operand_check.h"

namespace quern::cuda {

namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kManyThreads = 512;
constexpr int kManyWarps = kManyThreads / kWarp;
constexpr int kFewPositions = 16;  ///< tokens that occur more often get whole blocks
constexpr int kScanThreads = 1024;
constexpr int kTile = 4 * kScanThreads;  ///< counts that one block scans

// ---- sorting ----

/// A sorted position; read at once.
struct alignas(16) Entry {
  int position, token;
  int run;  ///< positions of the token, where it begins; 0 elsewhere
  int unused;
};

/// Token v is at entry[first[v]] up to entry[first[v + 1]].
struct Buckets {
  int* first;    ///< (V + 1)
  Entry* entry;  ///< (N)
};

struct Tokens {
  const int* token;  ///< (N)
  int count;
  std::int64_t vocabulary;
  __device__ bool known(int id) const { return id >= 0 && id < vocabulary; }
};

/// first[v + 1] = how often v occurs, zeroed before; place[n] = how many of its token came before, in some order.
__global__ void count_kernel(const Tokens tokens, int* first, int* place) {
  const int n = blockIdx.x * kThreads + threadIdx.x;
  if (n < tokens.count && tokens.known(tokens.token[n])) place[n] = atomicAdd(&first[tokens.token[n] + 1], 1);
}

/// The block's sum before each thread's `mine`, and the block's whole sum. Integers: the order does not matter.
struct BlockScan {
  int before, whole;
};
__device__ __forceinline__ BlockScan block_scan(int mine) {
  __shared__ int warp_sums[kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  auto scan_warp = [lane](int value) {
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const int before = __shfl_up_sync(~0u, value, offset);
      if (lane >= offset) value += before;
    }
    return value;
  };
  const int inclusive = scan_warp(mine);
  if (lane == kWarp - 1) warp_sums[warp] = inclusive;
  __syncthreads();
  if (warp == 0) warp_sums[lane] = scan_warp(warp_sums[lane]);
  __syncthreads();
  return {(warp > 0 ? warp_sums[warp - 1] : 0) + inclusive - mine, warp_sums[kWarp - 1]};
}

/// Four neighbouring counts of a thread.
struct Counts {
  int at[4];
  __device__ int sum() const { return at[0] + at[1] + at[2] + at[3]; }
};
__device__ __forceinline__ Counts load_counts(const int* values, std::int64_t at, std::int64_t count) {
  Counts counts;
#pragma unroll
  for (int i = 0; i < 4; ++i) counts.at[i] = at + i < count ? values[at + i] : 0;
  return counts;
}

/// The sum of each tile of counts.
__global__ void __launch_bounds__(kScanThreads) tile_kernel(const int* values, std::int64_t count, int* tile_sums) {
  const Counts mine = load_counts(values, std::int64_t{blockIdx.x} * kTile + 4 * threadIdx.x, count);
  const BlockScan scan = block_scan(mine.sum());
  if (threadIdx.x == 0) tile_sums[blockIdx.x] = scan.whole;
}

/// Counts become sums of all counts up to here.
__global__ void __launch_bounds__(kScanThreads) scan_kernel(int* values, std::int64_t count, const int* tile_sums) {
  int before = 0;  // of the tiles before this one
  for (int tile = static_cast<int>(threadIdx.x); tile < static_cast<int>(blockIdx.x); tile += kScanThreads)
    before += tile_sums[tile];
  before = block_scan(before).whole;
  __syncthreads();
  const std::int64_t at = std::int64_t{blockIdx.x} * kTile + 4 * threadIdx.x;
  const Counts mine = load_counts(values, at, count);
  int sum = before + block_scan(mine.sum()).before;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum += mine.at[i];
    if (at + i < count) values[at + i] = sum;
  }
}

/// Positions go to their token's bucket, in some order.
__global__ void scatter_kernel(const Tokens tokens, const int* first, const int* place, int* unsorted) {
  const int n = blockIdx.x * kThreads + threadIdx.x;
  if (n < tokens.count && tokens.known(tokens.token[n])) unsorted[first[tokens.token[n]] + place[n]] = n;
}

/// Each position of a bucket counts the smaller ones there.
__global__ void sort_kernel(const Tokens tokens, const int* unsorted, Buckets buckets) {
  const int at = blockIdx.x * kThreads + threadIdx.x;
  if (at >= buckets.first[tokens.vocabulary]) return;
  const int position = unsorted[at], token = tokens.token[position];
  const int begin = buckets.first[token], end = buckets.first[token + 1];
  int rank = 0;
#pragma unroll 8
  for (int i = begin; i < end; ++i) rank += unsorted[i] < position;
  buckets.entry[begin + rank] = {position, token, rank == 0 ? end - begin : 0, 0};
}

// ---- sums ----

/// Elements of T that are as many as a pack of another type: dy's packs decide, dtable's are read in parts.
template <class T, class Out, Access kAccess>
__device__ __forceinline__ void store_sum(Out* row, std::int64_t at, std::int64_t columns, const Floats<T>& sum,
                                          bool add) {
  constexpr int kSums = kPack<T>, kOuts = kPack<Out>, kParts = std::max(kSums / kOuts, 1);
  if constexpr (kSums < kOuts) {  // sums in fp32 into bf16: half a pack, element by element
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

/// Tokens that occur at most kFewPositions times: a warp a sorted position, which works where a token begins.
template <class T, class Out, Access kAccess>
__global__ void __launch_bounds__(kThreads)
    sum_few_kernel(const T* __restrict__ dy, const Tokens tokens, Buckets buckets, Out* __restrict__ dtable,
                   std::int64_t columns, bool add) {
  const int lane = threadIdx.x % kWarp, begin = blockIdx.x * kWarps + threadIdx.x / kWarp;
  if (begin >= buckets.first[tokens.vocabulary]) return;
  const Entry entry = buckets.entry[begin];
  if (entry.run == 0 || entry.run > kFewPositions) return;
  for (std::int64_t at = lane * kPack<T>; at < columns; at += kWarp * kPack<T>) {
    Floats<T> sum{};
    add_row<T, kAccess>(sum, dy + entry.position * columns, at, columns);
#pragma unroll 4
    for (int i = begin + 1; i < begin + entry.run; ++i)
      add_row<T, kAccess>(sum, dy + buckets.entry[i].position * columns, at, columns);
    store_sum<T, Out, kAccess>(dtable + entry.token * columns, at, columns, sum, add);
  }
}

/// Frequent tokens, blocks of row y their y-th columns: warp w sums positions w, w + 16, ...; the warps' sums are added
/// in order. A frequent token is found by the first of its positions whose index is a multiple of kFewPositions + 1.
template <class T, class Out, Access kAccess>
__global__ void __launch_bounds__(kManyThreads)
    sum_many_kernel(const T* __restrict__ dy, const Tokens tokens, Buckets buckets, Out* __restrict__ dtable,
                    std::int64_t columns, bool add) {
  constexpr int kStep = kFewPositions + 1;
  __shared__ Floats<T> parts[kManyWarps][kWarp];
  __shared__ int tokens_found[kManyThreads], found;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const std::int64_t at = (std::int64_t{blockIdx.y} * kWarp + lane) * kPack<T>;
  const int sorted = buckets.first[tokens.vocabulary], probes = (sorted + kStep - 1) / kStep;
  for (int base = blockIdx.x; base < probes; base += gridDim.x * kManyThreads) {
    if (threadIdx.x == 0) found = 0;
    __syncthreads();
    const int probe = base + static_cast<int>(gridDim.x * threadIdx.x);
    if (probe < probes) {
      const int token = buckets.entry[probe * kStep].token, begin = buckets.first[token];
      if (buckets.first[token + 1] - begin > kFewPositions && probe * kStep - begin < kStep)
        tokens_found[atomicAdd(&found, 1)] = token;  // the order in which tokens are taken changes no sum
    }
    __syncthreads();
    for (int f = 0; f < found; ++f) {
      const int token = tokens_found[f], end = buckets.first[token + 1];
      Floats<T> sum{};
#pragma unroll 8
      for (int i = buckets.first[token] + warp; i < end; i += kManyWarps)
        add_row<T, kAccess>(sum, dy + buckets.entry[i].position * columns, at, columns);
      parts[warp][lane] = sum;
      __syncthreads();
      if (warp == 0) {
        for (int w = 1; w < kManyWarps; ++w) {
#pragma unroll
          for (int i = 0; i < kPack<T>; ++i) sum.at[i] += parts[w][lane].at[i];
        }
        store_sum<T, Out, kAccess>(dtable + token * columns, at, columns, sum, add);
      }
      __syncthreads();
    }
    __syncthreads();
  }
}

struct GradShape {
  std::int64_t count = 0, vocabulary = 0, columns = 0;
  bool add = false;

  std::int64_t tiles() const { return ceil_divide(vocabulary + 1, kTile); }
  /// Integers, each list from a multiple of 64.
  static std::size_t rounded(std::int64_t integers) { return (static_cast<std::size_t>(integers) + 63) / 64 * 64; }
  std::size_t workspace() const {
    return 4 * (4 * rounded(count) + rounded(vocabulary + 1) + 2 * rounded(count) + rounded(tiles()));
  }
};

/// Sorts positions into the workspace.
Buckets sort_positions(const GradShape& shape, const Tokens& tokens, void* workspace, cudaStream_t stream) {
  int* next = static_cast<int*>(workspace);
  auto take = [&next](std::int64_t count) {
    int* list = next;
    next += GradShape::rounded(count);
    return list;
  };
  Buckets buckets;
  buckets.entry = reinterpret_cast<Entry*>(next);
  next += 4 * GradShape::rounded(shape.count);
  buckets.first = take(shape.vocabulary + 1);
  int *place = take(shape.count), *unsorted = take(shape.count), *tile_sums = take(shape.tiles());
  const auto blocks = static_cast<unsigned>(ceil_divide(shape.count, kThreads));
  const auto tiles = static_cast<unsigned>(shape.tiles());
  const std::int64_t counts = shape.vocabulary + 1;
  QUERN_CUDA(cudaMemsetAsync(buckets.first, 0, static_cast<std::size_t>(counts) * sizeof(int), stream));
  count_kernel<<<blocks, kThreads, 0, stream>>>(tokens, buckets.first, place);
  QUERN_CUDA(cudaGetLastError());
  tile_kernel<<<tiles, kScanThreads, 0, stream>>>(buckets.first, counts, tile_sums);
  QUERN_CUDA(cudaGetLastError());
  scan_kernel<<<tiles, kScanThreads, 0, stream>>>(buckets.first, counts, tile_sums);
  QUERN_CUDA(cudaGetLastError());
  scatter_kernel<<<blocks, kThreads, 0, stream>>>(tokens, buckets.first, place, unsorted);
  QUERN_CUDA(cudaGetLastError());
  sort_kernel<<<blocks, kThreads, 0, stream>>>(tokens, unsorted, buckets);
  QUERN_CUDA(cudaGetLastError());
  return buckets;
}

template <class T, class Out, Access kAccess>
void sum_rows(const GradShape& shape, const Tokens& tokens, const Buckets& buckets, const View& dy, const View& dtable,
              cudaStream_t stream) {
  const auto few = static_cast<unsigned>(ceil_divide(shape.count, kWarps));
  sum_few_kernel<T, Out, kAccess>
      <<<few, kThreads, 0, stream>>>(dy.as<const T>(), tokens, buckets, dtable.as<Out>(), shape.columns, shape.add);
  QUERN_CUDA(cudaGetLastError());
  const dim3 many(static_cast<unsigned>(std::min<std::int64_t>(ceil_divide(shape.count, kFewPositions + 1), 256)),
                  static_cast<unsigned>(ceil_divide(shape.columns, kWarp * kPack<T>)));
  sum_many_kernel<T, Out, kAccess><<<many, kManyThreads, 0, stream>>>(dy.as<const T>(), tokens, buckets,
                                                                      dtable.as<Out>(), shape.columns, shape.add);
  QUERN_CUDA(cudaGetLastError());
}

void embedding_grad(const GradShape& shape, std::span<const View> inputs, std::span<const View> outputs,
                    const Exec& exec) {
  const View &dy = inputs[0], &dtable = outputs[0];
  if (shape.vocabulary == 0 || shape.columns == 0) return;
  cudaStream_t stream = stream_of(exec);
  if (!shape.add) QUERN_CUDA(cudaMemsetAsync(dtable.data, 0, dtable.bytes(), stream));  // rows without a token
  if (shape.count == 0) return;
  const Tokens tokens{inputs[1].as<const int>(), static_cast<int>(shape.count), shape.vocabulary};
  const Buckets buckets = sort_positions(shape, tokens, exec.workspace, stream);
  with_element(dy.dtype, [&](auto element) {
    with_element(dtable.dtype, [&](auto sum) {
      using T = decltype(element);
      using Out = decltype(sum);
      bool packed = packed_rows<T>(shape.columns, {dy.data, dtable.data}) && shape.columns % kPack<Out> == 0;
      auto run = packed ? sum_rows<T, Out, Access::vector> : sum_rows<T, Out, Access::scalar>;
      run(shape, tokens, buckets, dy, dtable, stream);
    });
  });
}

GradShape grad_shape(const OpInstance& op) {
  return {element_count(op.inputs[1].extents), op.outputs[0].extents[0], op.outputs[0].extents[1],
          op.outputs[0].accumulate};
}

OpSupport query_grad(const OpInstance& op, const CudaTraits&) {
  std::int64_t count = element_count(extents_of(op, 1));
  if (op.outputs.size() != 1 || op.outputs[0].extents.size() != 2)
    return {"embedding_grad: dtable must be a matrix", 0};
  const Extents& table = op.outputs[0].extents;
  OperandCheck check(op, 2, 1);
  check.input(0, "dy", {count, table[1]})
      .input(1, "tokens", extents_of(op, 1), DType::i32)
      .sum(0, "dtable", table)
      .that(count < (std::int64_t{1} << 30), "takes fewer than 2^30 tokens");
  return check.ok() ? check.support(grad_shape(op).workspace()) : check.support();
}

Launch prepare_grad(const OpInstance& op, CudaContext&) {
  return [shape = grad_shape(op)](std::span<const View> inputs, std::span<const View> outputs, const Exec& exec) {
    embedding_grad(shape, inputs, outputs, exec);
  };
}

}  // namespace

void add_embedding_grad_op(OpTable& table) { table["embedding_grad"] = {prepare_grad, query_grad}; }

}  // namespace quern::cuda
