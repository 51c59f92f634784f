#pragma once
// Kernels of RMS norm of the queries and keys of a packed qkv (QK-norm) and its gradient, also fused with the rotation
// that follows the norm, or with that rotation's gradient: of each head, by the lanes that share it, and of all heads
// together, by a block a token. Values pass through. Outputs may be an input's memory: a thread writes only what it
// alone has read.

#include "primitives/heads.cuh"

namespace quern::cuda {

/// Sum over the lanes of a head, known to all of them; every lane of the warp takes part.
__device__ __forceinline__ float lanes_sum(float value, int lane_bits) {
  for (int lanes = 1 << lane_bits >> 1; lanes > 0; lanes /= 2) value += __shfl_xor_sync(0xffffffffu, value, lanes);
  return value;
}

/// A thread's place: which head of which token, and where in it.
struct Place {
  std::uint32_t token, head;
  int at;
  bool inside;
};

template <class T>
__device__ __forceinline__ Place place_of(std::uint32_t thread, int lane_bits, std::uint32_t units,
                                          const FastDivide& row) {
  Place place;
  const std::uint32_t unit = thread >> lane_bits;
  place.inside = unit < units;
  place.token = row.divide(place.inside ? unit : 0, place.head);
  place.at = static_cast<int>(thread & ((1u << lane_bits) - 1)) * kPack<T>;
  return place;
}

/// Sum of a b over the elements of both halves, the first first.
template <class T>
__device__ __forceinline__ float dot(const Floats<T>& a1, const Floats<T>& b1, const Floats<T>& a2,
                                     const Floats<T>& b2) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) sum = fmaf(a1.at[i], b1.at[i], sum);
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) sum = fmaf(a2.at[i], b2.at[i], sum);
  return sum;
}

/// x * rstd * weight.
template <class T>
__device__ __forceinline__ HeadPair<T> normed_pair(Floats<T> first, Floats<T> second, float rstd,
                                                   const HeadPair<T>& weight) {
  const Floats<T> first_weight = unpack(weight.first), second_weight = unpack(weight.second);
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) {
    first.at[i] = first.at[i] * rstd * first_weight.at[i];
    second.at[i] = second.at[i] * rstd * second_weight.at[i];
  }
  return {round_pack(first), round_pack(second)};
}

struct HeadNormArguments {
  const void *x, *query_weight, *key_weight;  ///< (N, packed), (D), (D); all heads together: (H D), (K D)
  void *y, *z;                                ///< like x: the norm, and its rotation; null: not wanted
  float* rstd;                                ///< (N, H + K), or (N, 2); null: not wanted
  const std::int32_t* positions;              ///< (N), for z
  RopeTable table;
  std::uint32_t units;  ///< tokens * row_heads
  FastDivide row;       ///< by row_heads
  int heads, normed, row_heads, head_dim, half, lane_bits;
  float eps;
};

template <class T, Access kAccess, bool kRope>
__global__ void __launch_bounds__(kHeadThreads) head_norm_kernel(const HeadNormArguments args) {
  const Place place = place_of<T>(blockIdx.x * kHeadThreads + threadIdx.x, args.lane_bits, args.units, args.row);
  const int half = place.inside ? args.half : 0, head_dim = place.inside ? args.head_dim : 0;
  const std::int64_t offset = (std::int64_t{place.token} * args.row_heads + place.head) * args.head_dim;
  const int head = static_cast<int>(place.head);
  const bool normed = head < args.normed;
  HeadPair<T> pair = load_head<kAccess>(static_cast<const T*>(args.x) + offset, place.at, half, head_dim);
  const Floats<T> first = unpack(pair.first), second = unpack(pair.second);
  const float squares = lanes_sum(dot(first, first, second, second), args.lane_bits);
  if (normed) {
    const float rstd = 1.0f / sqrtf(squares / static_cast<float>(args.head_dim) + args.eps);
    if (args.rstd && place.at == 0 && place.inside) args.rstd[std::int64_t{place.token} * args.normed + head] = rstd;
    const T* weight = static_cast<const T*>(head < args.heads ? args.query_weight : args.key_weight);
    pair = normed_pair(first, second, rstd, load_head<kAccess>(weight, place.at, args.half, args.head_dim));
  }
  if (args.y) store_head<kAccess>(static_cast<T*>(args.y) + offset, place.at, half, head_dim, pair);
  if constexpr (kRope) {
    if (!args.z) return;
    if (normed && place.inside)
      pair = rotate<kAccess>(pair, args.table, args.positions[place.token], 1.0f, place.at, args.half);
    store_head<kAccess>(static_cast<T*>(args.z) + offset, place.at, half, head_dim, pair);
  }
}

struct HeadGradArguments {
  const void *dy, *x, *query_weight, *key_weight;  ///< (N, packed), (N, packed), (D), (D), or as above
  const float* rstd;                               ///< (N, H + K), or (N, 2)
  const std::int32_t* positions;                   ///< (N); of kRope, as the next two
  RopeTable table;
  void* d;                      ///< like x, the rotation's gradient; null: not wanted
  void* dx;                     ///< like x, null: not wanted
  float* partials;              ///< a row a block, sums of both weights' gradients; null: not wanted
  std::uint32_t units, rounds;  ///< tokens * row_heads, and how often the grid goes over them
  FastDivide row;
  int heads, normed, row_heads, head_dim, half, lane_bits;
};

/// Adds over the heads that a block's threads visited, in the order of lanes and warps, into `to` (D).
template <class T>
__device__ __forceinline__ void store_head_sums(Floats<T> first, Floats<T> second,
                                                float (&shared)[kHeadThreads / 32][1024 / sizeof(T)],
                                                const HeadGradArguments& args, float* to) {
  const int lanes = 1 << args.lane_bits, lane = static_cast<int>(threadIdx.x) % 32,
            warp = static_cast<int>(threadIdx.x) / 32;
  for (int other = 16; other >= lanes; other /= 2) {
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) {
      first.at[i] += __shfl_xor_sync(0xffffffffu, first.at[i], other);
      second.at[i] += __shfl_xor_sync(0xffffffffu, second.at[i], other);
    }
  }
  __syncthreads();  // no thread reads an earlier sum any more
  if (lane < lanes) {
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) {
      const int at = lane * kPack<T> + i;
      if (at < args.half) shared[warp][at] = first.at[i];
      if (at < args.head_dim - args.half) shared[warp][args.half + at] = second.at[i];
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < args.head_dim; i += kHeadThreads) {
    float total = 0;
    for (int w = 0; w < kHeadThreads / 32; ++w) total += shared[w][i];
    to[i] = total;
  }
}

template <class T, Access kAccess, bool kRope>
__global__ void __launch_bounds__(kHeadThreads) head_norm_grad_kernel(const HeadGradArguments args) {
  __shared__ float shared[kHeadThreads / 32][1024 / sizeof(T)];
  Floats<T> query_first = {}, query_second = {}, key_first = {}, key_second = {};
  for (std::uint32_t round = 0; round < args.rounds; ++round) {
    const std::uint32_t thread = (round * gridDim.x + blockIdx.x) * kHeadThreads + threadIdx.x;
    const Place place = place_of<T>(thread, args.lane_bits, args.units, args.row);
    const int half = place.inside ? args.half : 0, head_dim = place.inside ? args.head_dim : 0;
    const std::int64_t offset = (std::int64_t{place.token} * args.row_heads + place.head) * args.head_dim;
    const int head = static_cast<int>(place.head);
    const bool normed = place.inside && head < args.normed, is_query = head < args.heads;
    HeadPair<T> dy = load_head<kAccess>(static_cast<const T*>(args.dy) + offset, place.at, half, head_dim);
    if constexpr (kRope) {
      if (normed) dy = rotate<kAccess>(dy, args.table, args.positions[place.token], -1.0f, place.at, args.half);
      if (args.d) store_head<kAccess>(static_cast<T*>(args.d) + offset, place.at, half, head_dim, dy);
    }
    // A value head needs no input, but all lanes of the warp take part in the sum.
    const HeadPair<T> x =
        load_head<kAccess>(static_cast<const T*>(args.x) + offset, place.at, normed ? half : 0, normed ? head_dim : 0);
    const HeadPair<T> weight = load_head<kAccess>(static_cast<const T*>(is_query ? args.query_weight : args.key_weight),
                                                  place.at, args.half, args.head_dim);
    const float rstd = normed ? args.rstd[std::int64_t{place.token} * args.normed + head] : 0.0f;
    Floats<T> d1 = unpack(dy.first), d2 = unpack(dy.second);
    const Floats<T> x1 = unpack(x.first), x2 = unpack(x.second), w1 = unpack(weight.first), w2 = unpack(weight.second);
    float product = 0;
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) product = fmaf(d1.at[i] * w1.at[i], x1.at[i], product);
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) product = fmaf(d2.at[i] * w2.at[i], x2.at[i], product);
    product = lanes_sum(product, args.lane_bits);
    if (normed) {
      const float projection = rstd * product / static_cast<float>(args.head_dim);  // mean(g * n)
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) {
        const float n1 = x1.at[i] * rstd, n2 = x2.at[i] * rstd;
        if (is_query) {
          query_first.at[i] = fmaf(d1.at[i], n1, query_first.at[i]);
          query_second.at[i] = fmaf(d2.at[i], n2, query_second.at[i]);
        } else {
          key_first.at[i] = fmaf(d1.at[i], n1, key_first.at[i]);
          key_second.at[i] = fmaf(d2.at[i], n2, key_second.at[i]);
        }
        d1.at[i] = rstd * fmaf(-n1, projection, d1.at[i] * w1.at[i]);
        d2.at[i] = rstd * fmaf(-n2, projection, d2.at[i] * w2.at[i]);
      }
      dy = {round_pack(d1), round_pack(d2)};
    }
    if (args.dx) store_head<kAccess>(static_cast<T*>(args.dx) + offset, place.at, half, head_dim, dy);
  }
  if (!args.partials) return;
  float* partial = args.partials + std::int64_t{blockIdx.x} * 2 * args.head_dim;
  store_head_sums<T>(query_first, query_second, shared, args, partial);
  store_head_sums<T>(key_first, key_second, shared, args, partial + args.head_dim);
}

// ---- All queries together, and all keys: a block a token, whose threads go over its heads, first for the sum. ----

/// Of queries and of keys.
struct TwoSums {
  float query = 0, key = 0;
  __device__ __forceinline__ void add(bool is_query, float value) { (is_query ? query : key) += value; }
};

/// The block's, known to all its threads.
__device__ __forceinline__ TwoSums block_sums(const TwoSums& mine, float (&shared)[2][kHeadThreads / 32]) {
  const float query = lanes_sum(mine.query, 5), key = lanes_sum(mine.key, 5);
  __syncthreads();  // no thread reads earlier sums any more
  if (threadIdx.x % 32 == 0) {
    shared[0][threadIdx.x / 32] = query;
    shared[1][threadIdx.x / 32] = key;
  }
  __syncthreads();
  TwoSums all;
#pragma unroll
  for (int warp = 0; warp < kHeadThreads / 32; ++warp) {
    all.query += shared[0][warp];
    all.key += shared[1][warp];
  }
  return all;
}

/// visit(head, at) of each place of this thread in the first `heads` heads.
template <class T, class Visit>
__device__ __forceinline__ void each_place(int heads, int lane_bits, Visit visit) {
  for (int i = static_cast<int>(threadIdx.x); i < heads << lane_bits; i += kHeadThreads)
    visit(i >> lane_bits, (i & ((1 << lane_bits) - 1)) * kPack<T>);
}

/// Of a head's weights: the keys' stand apart.
template <class T, class Arguments>
__device__ __forceinline__ const T* width_weight(const Arguments& args, int head) {
  const bool is_query = head < args.heads;
  return static_cast<const T*>(is_query ? args.query_weight : args.key_weight) +
         std::int64_t{is_query ? head : head - args.heads} * args.head_dim;
}

template <class Arguments>
__device__ __forceinline__ float width_mean(const Arguments& args, bool is_query, float sum) {
  return sum / static_cast<float>((is_query ? args.heads : args.normed - args.heads) * args.head_dim);
}

template <class T, Access kAccess, bool kRope>
__global__ void __launch_bounds__(kHeadThreads) width_norm_kernel(const HeadNormArguments args) {
  __shared__ float shared[2][kHeadThreads / 32];
  const std::int64_t token = blockIdx.x, row = token * args.row_heads;
  auto load = [&](int head, int at) {
    return load_head<kAccess>(static_cast<const T*>(args.x) + (row + head) * args.head_dim, at, args.half,
                              args.head_dim);
  };
  TwoSums squares;
  each_place<T>(args.normed, args.lane_bits, [&](int head, int at) {
    const HeadPair<T> x = load(head, at);
    const Floats<T> first = unpack(x.first), second = unpack(x.second);
    squares.add(head < args.heads, dot(first, first, second, second));
  });
  squares = block_sums(squares, shared);
  const float query = 1.0f / sqrtf(width_mean(args, true, squares.query) + args.eps),
              key = 1.0f / sqrtf(width_mean(args, false, squares.key) + args.eps);
  if (args.rstd && threadIdx.x < 2) args.rstd[2 * token + threadIdx.x] = threadIdx.x == 0 ? query : key;
  each_place<T>(args.row_heads, args.lane_bits, [&](int head, int at) {
    HeadPair<T> pair = load(head, at);
    const std::int64_t offset = (row + head) * args.head_dim;
    const bool normed = head < args.normed;
    if (normed)
      pair = normed_pair(unpack(pair.first), unpack(pair.second), head < args.heads ? query : key,
                         load_head<kAccess>(width_weight<T>(args, head), at, args.half, args.head_dim));
    if (args.y) store_head<kAccess>(static_cast<T*>(args.y) + offset, at, args.half, args.head_dim, pair);
    if constexpr (kRope) {
      if (!args.z) return;
      if (normed) pair = rotate<kAccess>(pair, args.table, args.positions[token], 1.0f, at, args.half);
      store_head<kAccess>(static_cast<T*>(args.z) + offset, at, args.half, args.head_dim, pair);
    }
  });
}

/// A block adds its tokens up in its row of the partials, where each thread has its own elements.
template <class T, Access kAccess, bool kRope>
__global__ void __launch_bounds__(kHeadThreads) width_norm_grad_kernel(const HeadGradArguments args) {
  __shared__ float shared[2][kHeadThreads / 32];
  for (std::uint32_t round = 0; round < args.rounds; ++round) {
    const std::int64_t token = std::int64_t{round} * gridDim.x + blockIdx.x, row = token * args.row_heads;
    if (row >= args.units) return;
    auto load = [&](const void* x, int head, int at) {
      return load_head<kAccess>(static_cast<const T*>(x) + (row + head) * args.head_dim, at, args.half, args.head_dim);
    };
    auto load_dy = [&](int head, int at) {
      HeadPair<T> dy = load(args.dy, head, at);
      if constexpr (kRope) {
        if (head < args.normed) dy = rotate<kAccess>(dy, args.table, args.positions[token], -1.0f, at, args.half);
      }
      return dy;
    };
    auto load_weight = [&](int head, int at) {
      return load_head<kAccess>(width_weight<T>(args, head), at, args.half, args.head_dim);
    };
    TwoSums products;
    each_place<T>(args.normed, args.lane_bits, [&](int head, int at) {
      const HeadPair<T> dy = load_dy(head, at), x = load(args.x, head, at), weight = load_weight(head, at);
      Floats<T> d1 = unpack(dy.first), d2 = unpack(dy.second);
      const Floats<T> w1 = unpack(weight.first), w2 = unpack(weight.second);
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) {
        d1.at[i] *= w1.at[i];
        d2.at[i] *= w2.at[i];
      }
      products.add(head < args.heads, dot(d1, unpack(x.first), d2, unpack(x.second)));
    });
    products = block_sums(products, shared);
    const float query = args.rstd[2 * token], key = args.rstd[2 * token + 1];
    each_place<T>(args.row_heads, args.lane_bits, [&](int head, int at) {
      HeadPair<T> dy = load_dy(head, at);
      const std::int64_t offset = (row + head) * args.head_dim;
      const bool normed = head < args.normed, is_query = head < args.heads;
      const HeadPair<T> x = normed ? load(args.x, head, at) : HeadPair<T>{};
      if constexpr (kRope) {
        if (args.d) store_head<kAccess>(static_cast<T*>(args.d) + offset, at, args.half, args.head_dim, dy);
      }
      if (normed) {
        const HeadPair<T> weight = load_weight(head, at);
        const float rstd = is_query ? query : key;
        const float projection = rstd * width_mean(args, is_query, is_query ? products.query : products.key);
        Floats<T> d1 = unpack(dy.first), d2 = unpack(dy.second);
        const Floats<T> x1 = unpack(x.first), x2 = unpack(x.second), w1 = unpack(weight.first),
                        w2 = unpack(weight.second);
        float* sums = args.partials + (std::int64_t{blockIdx.x} * args.normed + head) * args.head_dim;
        auto add = [&](int i, float value) { sums[i] = round == 0 ? value : sums[i] + value; };
#pragma unroll
        for (int i = 0; i < kPack<T>; ++i) {
          const float n1 = x1.at[i] * rstd, n2 = x2.at[i] * rstd;
          if (args.partials && at + i < args.half) add(at + i, d1.at[i] * n1);
          if (args.partials && at + i < args.head_dim - args.half) add(args.half + at + i, d2.at[i] * n2);
          d1.at[i] = rstd * fmaf(-n1, projection, d1.at[i] * w1.at[i]);
          d2.at[i] = rstd * fmaf(-n2, projection, d2.at[i] * w2.at[i]);
        }
        dy = {round_pack(d1), round_pack(d2)};
      }
      if (args.dx) store_head<kAccess>(static_cast<T*>(args.dx) + offset, at, args.half, args.head_dim, dy);
    });
  }
}

}  // namespace quern::cuda
