// RMS norm of each query and key head of a packed qkv (QK-norm) and its gradient, also fused with the rotation that
// follows the norm, or with that rotation's gradient. Values pass through. Outputs may be an input's memory: a thread
// writes only what it alone has read.

#include "elementwise/column_sums.h"
#include "norms/norm_ops.h"
#include "primitives/heads.cuh"
#include "shared/operands/op_checks.h"

namespace quern::cuda {

namespace {

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

struct HeadNormArguments {
  const void *x, *query_weight, *key_weight;  ///< (N, packed), (D), (D)
  void *y, *z;                                ///< like x: the norm, and its rotation; null: not wanted
  float* rstd;                                ///< (N, H + K), null: not wanted
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
  Floats<T> first = unpack(pair.first), second = unpack(pair.second);
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) squares = fmaf(first.at[i], first.at[i], squares);
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) squares = fmaf(second.at[i], second.at[i], squares);
  squares = lanes_sum(squares, args.lane_bits);
  if (normed) {
    const float rstd = 1.0f / sqrtf(squares / static_cast<float>(args.head_dim) + args.eps);
    if (args.rstd && place.at == 0 && place.inside) args.rstd[std::int64_t{place.token} * args.normed + head] = rstd;
    const T* weight = static_cast<const T*>(head < args.heads ? args.query_weight : args.key_weight);
    const HeadPair<T> weights = load_head<kAccess>(weight, place.at, args.half, args.head_dim);
    const Floats<T> first_weight = unpack(weights.first), second_weight = unpack(weights.second);
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) {
      first.at[i] = first.at[i] * rstd * first_weight.at[i];
      second.at[i] = second.at[i] * rstd * second_weight.at[i];
    }
    pair = {round_pack(first), round_pack(second)};
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
  const void *dy, *x, *query_weight, *key_weight;  ///< (N, packed), (N, packed), (D), (D)
  const float* rstd;                               ///< (N, H + K)
  const std::int32_t* positions;                   ///< (N); of kRope, as the next two
  RopeTable table;
  void* d;                      ///< like x, the rotation's gradient; null: not wanted
  void* dx;                     ///< like x, null: not wanted
  float* partials;              ///< (blocks, 2 D), sums of both weights' gradients; null: not wanted
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

// qkv (N, (H + 2 K) D), query_weight (D), key_weight (D) -> y like qkv, rstd (N, H + K) f32;
// kRope: also positions (N) i32 -> z = rope(y)
template <bool kRope>
Launch prepare_head_norm(const OpInstance& op, CudaContext& context) {
  const PackedHeads packed(op.attributes);
  const DType type = op.inputs[0].dtype;
  const HeadLanes layout(packed, type);
  const auto eps = static_cast<float>(op.attributes.real("eps"));
  const std::int64_t units = matrix_of(op, 0).rows * packed.all();
  RopeTable table;
  if constexpr (kRope) table = make_rope_table(op, context);
  auto load = [&](auto access) {
    return with_element(type, [&](auto element) {
      KernelFunction<HeadNormArguments> kernel = head_norm_kernel<decltype(element), access(), kRope>;
      return load_kernel(kernel, dim3(kHeadThreads), context.multiprocessors);
    });
  };
  auto vector = load(AccessConstant<Access::vector>{}), scalar = load(AccessConstant<Access::scalar>{});
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    if (units == 0) return;
    HeadNormArguments args{.x = in[0].data,
                           .query_weight = in[1].data,
                           .key_weight = in[2].data,
                           .y = out[0].data,
                           .z = kRope ? out[2].data : nullptr,
                           .rstd = static_cast<float*>(out[1].data),
                           .positions = kRope ? static_cast<const std::int32_t*>(in[3].data) : nullptr,
                           .table = table,
                           .units = static_cast<std::uint32_t>(units),
                           .row = FastDivide(static_cast<std::uint32_t>(layout.row_heads)),
                           .heads = static_cast<int>(packed.heads),
                           .normed = static_cast<int>(packed.rotated()),
                           .row_heads = layout.row_heads,
                           .head_dim = layout.head_dim,
                           .half = layout.half,
                           .lane_bits = layout.lane_bits,
                           .eps = eps};
    bool whole = layout.whole && aligned_16({args.x, args.query_weight, args.key_weight, args.y, args.z});
    (whole ? vector : scalar).launch(layout.blocks(units), stream_of(exec), args);
  };
}

// dy, qkv (N, (H + 2 K) D), query_weight, key_weight (D), rstd (N, H + K) f32 -> dqkv, dquery_weight (D), dkey_weight
// (D); kRope: dy, positions (N) i32, qkv, ... -> rope_grad(dy), dqkv, ...
template <bool kRope>
Launch prepare_head_norm_grad(const OpInstance& op, CudaContext& context) {
  const PackedHeads packed(op.attributes);
  constexpr std::size_t kX = kRope ? 2 : 1, kDx = kRope ? 1 : 0;
  const DType type = op.inputs[kX].dtype;
  const HeadLanes layout(packed, type);
  const std::int64_t units = matrix_of(op, kX).rows * packed.all();
  const bool accumulate_query = op.outputs[kDx + 1].accumulate, accumulate_key = op.outputs[kDx + 2].accumulate;
  RopeTable table;
  if constexpr (kRope) table = make_rope_table(op, context);
  auto load = [&](auto access) {
    return with_element(type, [&](auto element) {
      KernelFunction<HeadGradArguments> kernel = head_norm_grad_kernel<decltype(element), access(), kRope>;
      return load_kernel(kernel, dim3(kHeadThreads), context.multiprocessors);
    });
  };
  auto vector = load(AccessConstant<Access::vector>{}), scalar = load(AccessConstant<Access::scalar>{});
  load_column_sums();
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    const View &dquery = out[kDx + 1], &dkey = out[kDx + 2];
    HeadGradArguments args{.dy = in[0].data,
                           .x = in[kX].data,
                           .query_weight = in[kX + 1].data,
                           .key_weight = in[kX + 2].data,
                           .rstd = static_cast<const float*>(in[kX + 3].data),
                           .positions = kRope ? static_cast<const std::int32_t*>(in[1].data) : nullptr,
                           .table = table,
                           .d = kRope ? out[0].data : nullptr,
                           .dx = out[kDx].data,
                           .partials = dquery || dkey ? static_cast<float*>(exec.workspace) : nullptr,
                           .units = static_cast<std::uint32_t>(units),
                           .rounds = 0,
                           .row = FastDivide(static_cast<std::uint32_t>(layout.row_heads)),
                           .heads = static_cast<int>(packed.heads),
                           .normed = static_cast<int>(packed.rotated()),
                           .row_heads = layout.row_heads,
                           .head_dim = layout.head_dim,
                           .half = layout.half,
                           .lane_bits = layout.lane_bits};
    bool whole = layout.whole && aligned_16({args.dy, args.x, args.query_weight, args.key_weight, args.d, args.dx});
    const auto& kernel = whole ? vector : scalar;
    std::int64_t blocks = std::min(kMostPartials, kernel.persistent(layout.blocks(units)));
    args.rounds = static_cast<std::uint32_t>(ceil_divide(layout.blocks(units), blocks));
    kernel.launch(blocks, stream_of(exec), args);
    std::int64_t pitch = 2 * packed.head_dim;
    if (args.partials)
      sum_partial_rows({args.partials, dquery, accumulate_query},
                       {args.partials + packed.head_dim, dkey, accumulate_key}, blocks, pitch, stream_of(exec));
  };
}

void check_each_head(OperandCheck& check, const OpInstance& op) {
  check.that(!op.attributes.has("over"), "has no kernel on this device for a norm of all heads together");
}

OpSupport query_head_norm(const OpInstance& op, bool rotated) {
  OperandCheck check(op, rotated ? 4 : 3, rotated ? 3 : 2);
  operands::check_head_norm(check, op, rotated);
  check_each_head(check, op);
  return check.support();
}

OpSupport query_head_norm_grad(const OpInstance& op, bool rotated) {
  const PackedHeads packed(op.attributes);
  const std::size_t x = rotated ? 2 : 1, dx = rotated ? 1 : 0;
  OperandCheck check(op, x + 4, dx + 3, dx + 1);
  operands::check_head_norm_grad(check, op, rotated);
  check_each_head(check, op);
  if (!check.ok() || !(op.outputs[dx + 1].present || op.outputs[dx + 2].present)) return check.support();
  std::int64_t blocks = HeadLanes(packed, op.inputs[x].dtype).blocks(matrix_of(op, x).rows * packed.all());
  return check.support(partial_bytes(std::max<std::int64_t>(1, std::min(blocks, kMostPartials)), 2 * packed.head_dim));
}

}  // namespace

void add_head_norm_ops(OpTable& table) {
  table["head_norm"] = {prepare_head_norm<false>,
                        [](const OpInstance& op, const CudaTraits&) { return query_head_norm(op, false); }};
  table["head_norm_rope"] = {prepare_head_norm<true>,
                             [](const OpInstance& op, const CudaTraits&) { return query_head_norm(op, true); }};
  table["head_norm_grad"] = {prepare_head_norm_grad<false>,
                             [](const OpInstance& op, const CudaTraits&) { return query_head_norm_grad(op, false); }};
  table["rope_grad_head_norm_grad"] = {prepare_head_norm_grad<true>, [](const OpInstance& op, const CudaTraits&) {
                                         return query_head_norm_grad(op, true);
                                       }};
}

}  // namespace quern::cuda
