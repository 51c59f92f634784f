// Sums and maxima over ranks, whose elements a communicator has brought together: (ranks, n) -> (n), in rank order or
// in a tree, rounded once, so that all devices give the same bits. Each element is read once: bound by memory.

#include "elementwise/elementwise_ops.h"
#include "primitives/vector.cuh"
#include "runtime/launch.cuh"
#include "runtime/operand_check.h"
#include "shared/operands/op_checks.h"

namespace quern::cuda {

namespace {

constexpr int kThreads = 256;

struct RankArguments {
  const void* x;    ///< (ranks, count)
  const void* own;  ///< (count), row `own_rank` instead of x's; y may be in its place
  void* y;          ///< (count)
  std::int64_t count;
  int ranks, own_rank;  ///< own_rank -1: all rows are x's
};

template <class T>
__device__ __forceinline__ const T* row_of(const RankArguments& args, int rank) {
  return static_cast<const T*>(rank == args.own_rank ? args.own : args.x) +
         (rank == args.own_rank ? 0 : rank * args.count);
}

struct Sum {
  template <class T>
  __device__ static T of(T total, T x) {
    return total + x;
  }
};

/// NaN where either is.
struct Maximum {
  __device__ static float of(float most, float x) { return x > most || x != x ? x : most; }
};

template <class T, Access kAccess, class Reduce>
__global__ void __launch_bounds__(kThreads) reduce_ranks_kernel(const RankArguments args) {
  const std::int64_t at = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * kPack<T>;
  Floats<T> totals = unpack(load_pack<kAccess>(row_of<T>(args, 0), at, args.count));
#pragma unroll 4
  for (int rank = 1; rank < args.ranks; ++rank) {
    const Floats<T> values = unpack(load_pack<kAccess>(row_of<T>(args, rank), at, args.count));
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) totals.at[i] = Reduce::of(totals.at[i], values.at[i]);
  }
  store_pack<kAccess>(static_cast<T*>(args.y), at, args.count, round_pack(totals));
}

__global__ void __launch_bounds__(kThreads) sum_doubles_kernel(const RankArguments args) {
  const std::int64_t at = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= args.count) return;
  double total = row_of<double>(args, 0)[at];
#pragma unroll 4
  for (int rank = 1; rank < args.ranks; ++rank) total = Sum::of(total, row_of<double>(args, rank)[at]);
  static_cast<double*>(args.y)[at] = total;
}

/// Neighbours first, then pairs of these, and so on: `partials` at level l is of 2^l ranks.
template <class T>
__global__ void __launch_bounds__(kThreads) reduce_tree_kernel(const RankArguments args) {
  constexpr int kLevels = 20;
  const std::int64_t at = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= args.count) return;
  const T* x = static_cast<const T*>(args.x) + at;
  T partials[kLevels], sum = 0;
  for (int rank = 0; rank < args.ranks; ++rank) {
    sum = x[rank * args.count];
    const bool last = rank + 1 == args.ranks;
#pragma unroll
    for (int level = 0; level < kLevels; ++level) {
      if ((rank >> level & 1) != 0) {
        sum = partials[level] + sum;
      } else if (!last) {
        partials[level] = sum;
        break;
      }
    }
  }
  static_cast<T*>(args.y)[at] = sum;
}

// x (ranks, n), own (n) or none -> y (n)
Launch prepare_reduce_ranks(const OpInstance& op, CudaContext& context) {
  const Matrix size = matrix_of(op, 0);
  const DType dtype = op.inputs[0].dtype;
  const bool maximum = op.attributes.word("reduction") == "maximum";
  auto load = [&](KernelFunction<RankArguments> kernel) {
    return load_kernel(kernel, dim3(kThreads), context.multiprocessors);
  };
  const bool tree = op.attributes.word("reduction") == "tree";
  const int own = op.inputs.size() > 1 ? static_cast<int>(op.attributes.integer("own")) : -1;
  auto load_packed = [&](auto access) {
    if (tree) return load(dtype == DType::f64 ? reduce_tree_kernel<double> : reduce_tree_kernel<float>);
    if (dtype == DType::f64) return load(sum_doubles_kernel);
    if (maximum) return load(reduce_ranks_kernel<float, access(), Maximum>);
    return with_element(dtype,
                        [&](auto element) { return load(reduce_ranks_kernel<decltype(element), access(), Sum>); });
  };
  // Rows follow each other without gaps, so all or none of them begin at 16-byte addresses.
  const bool whole = size.columns * static_cast<std::int64_t>(size_of(dtype)) % 16 == 0;
  auto scalar = load_packed(AccessConstant<Access::scalar>{});
  auto vector = whole ? load_packed(AccessConstant<Access::vector>{}) : scalar;
  const std::int64_t per_thread = tree || dtype == DType::f64 ? 1 : static_cast<std::int64_t>(16 / size_of(dtype));
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    if (size.columns == 0) return;
    const RankArguments args{in[0].data,   own < 0 ? nullptr : in[1].data, out[0].data,
                             size.columns, static_cast<int>(size.rows),    own};
    const auto& kernel = aligned_16({args.x, args.own, args.y}) ? vector : scalar;
    kernel.launch(ceil_divide(size.columns, kThreads * per_thread), stream_of(exec), args);
  };
}

OpSupport query_reduce_ranks(const OpInstance& op, const CudaTraits&) {
  return operands::check_reduce_ranks(op).support();
}

}  // namespace

void add_reduce_ranks_op(OpTable& table) { table["reduce_ranks"] = {prepare_reduce_ranks, query_reduce_ranks}; }

}  // namespace quern::cuda
