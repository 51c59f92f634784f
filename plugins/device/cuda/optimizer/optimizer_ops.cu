// The global gradient norm and the clip factor, on the device: no host synchronisation decides whether a step is
// applied.

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "optimizer/optimizer_ops.h"
#include "primitives/tensor_list.cuh"
#include "primitives/vector.cuh"
#include "quern/step_state.h"
#include "runtime/launch.cuh"
#include "runtime/operand_check.h"
#include "shared/operands/op_checks.h"

namespace quern::cuda {

namespace {

// ---- sum_squares ----

constexpr int kThreads = 256, kUnroll = 4;
constexpr int kChunk = 16 * kUnroll * 2 * kThreads;  // elements that a partial sum is of

struct SquaresTensor {
  const void* x;
  std::int64_t count;
};

struct SquaresArguments {
  TensorList<SquaresTensor> list;
  double* partials;  ///< a chunk each
};

/// The block's sum, known to thread 0; adds in the order of lanes and warps.
__device__ __forceinline__ double block_sum(double value) {
  __shared__ double warps[kThreads / 32];
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(0xffffffffu, value, lanes);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = 0;
  for (int warp = 0; warp < kThreads / 32; ++warp) value += warps[warp];
  return value;
}

/// A block a chunk. Squares of bf16 and fp32 are exact in double; only the sum rounds.
template <class T, Access kAccess>
__global__ void __launch_bounds__(kThreads) sum_squares_kernel(const __grid_constant__ SquaresArguments args) {
  constexpr int kStride = kThreads * kPack<T>;
  const Chunk chunk = chunk_at<kChunk>(args.list, static_cast<int>(blockIdx.x));
  const T* x = static_cast<const T*>(args.list.tensor[chunk.tensor].x);
  double sum = 0;
  for (std::int64_t at = chunk.begin + threadIdx.x * kPack<T>; at < chunk.end; at += kUnroll * kStride) {
    Pack<T> packs[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) packs[u] = load_pack<kAccess>(x, at + u * kStride, chunk.end);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const Floats<T> values = unpack(packs[u]);
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) sum = fma(double{values.at[i]}, double{values.at[i]}, sum);
    }
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) args.partials[blockIdx.x] = sum;
}

struct TensorSumArguments {
  const double* partials;
  const int* first_partial;  ///< of each tensor, and one past the last
  double* sums;
};

/// A block a tensor. The order depends on the number of the tensor's own chunks alone.
__global__ void __launch_bounds__(kThreads) tensor_sum_kernel(const TensorSumArguments args) {
  const int end = args.first_partial[blockIdx.x + 1];
  double sum = 0;
#pragma unroll 8
  for (int i = args.first_partial[blockIdx.x] + static_cast<int>(threadIdx.x); i < end; i += kThreads)
    sum += args.partials[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) args.sums[blockIdx.x] = sum;
}

std::vector<int> first_partials(const OpInstance& op) {
  std::vector<int> first{0};
  for (const Operand& x : op.inputs)
    first.push_back(first.back() + static_cast<int>(ceil_divide(element_count(x.extents), kChunk)));
  return first;
}

// x (any), n tensors -> sums (n) f64
Launch prepare_sum_squares(const OpInstance& op, CudaContext& context) {
  std::vector<std::int64_t> counts;
  for (const Operand& x : op.inputs) counts.push_back(element_count(x.extents));
  auto load = [&](auto access) {
    return with_element(op.inputs[0].dtype, [&](auto element) {
      KernelFunction<SquaresArguments> kernel = sum_squares_kernel<decltype(element), access()>;
      return load_kernel(kernel, dim3(kThreads), context.multiprocessors);
    });
  };
  auto vector = load(AccessConstant<Access::tail>{}), scalar = load(AccessConstant<Access::scalar>{});
  auto add = load_kernel<TensorSumArguments>(tensor_sum_kernel, dim3(kThreads), context.multiprocessors);
  const std::vector<int> first = first_partials(op);
  const auto* first_partial = static_cast<const int*>(context.constant(first.data(), first.size() * sizeof(int)));
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    auto* partials = static_cast<double*>(exec.workspace);
    bool aligned = true;
    for (const View& x : in) aligned = aligned && aligned_16({x.data});
    SquaresArguments args;
    args.partials = partials;
    auto tensor_at = [&](std::size_t i) { return SquaresTensor{in[i].data, counts[i]}; };
    for_tensor_lists<kChunk>(counts.size(), tensor_at, [&](const TensorList<SquaresTensor>& list) {
      args.list = list;
      (aligned ? vector : scalar).launch(list.chunks, stream_of(exec), args);
      args.partials += list.chunks;
    });
    add.launch(static_cast<std::int64_t>(counts.size()), stream_of(exec),
               {partials, first_partial, static_cast<double*>(out[0].data)});
  };
}

OpSupport query_sum_squares(const OpInstance& op, const CudaTraits&) {
  OperandCheck check(op, std::max<std::size_t>(op.inputs.size(), 1), 1);
  check.output(0, "sums", {static_cast<std::int64_t>(op.inputs.size())}, DType::f64);
  for (std::size_t i = 0; i < op.inputs.size(); ++i) check.input(i, "x", op.inputs[i].extents);
  return check.support(static_cast<std::size_t>(first_partials(op).back()) * sizeof(double));
}

// ---- clip_scale ----

/// Running sums. Which elements each has, and how they are added, docs/ops.md fixes.
constexpr int kLanes = 256;

struct SumsArray {
  const double* sums;
  std::int64_t count;
};
using SumsList = TensorList<SumsArray>;  // an element a chunk

struct ClipArguments {
  SumsList list;
  double* lanes;        ///< (kLanes) sums of the lists before; not read where `before` is 0
  std::int64_t before;  ///< elements of the lists before
  bool last;
  const LossStats* stats;
  const StepState* step;
  UpdateState* update;
};

__device__ UpdateState update_from(const LossStats& stats, float clip_norm, double squares) {
  UpdateState update;
  if (!(stats.valid_tokens > 0)) return update;
  const double mean = 1.0 / (stats.valid_tokens * double{kGradientSeed});
  const double norm = sqrt(squares) * mean;
  update.gradient_norm = static_cast<float>(norm);
  if (!isfinite(update.gradient_norm) || !isfinite(stats.loss_sum)) return update;
  const double clip = clip_norm > 0 && norm > clip_norm ? clip_norm / norm : 1.0;
  update.gradient_scale = static_cast<float>(clip * mean);
  update.apply = 1.0f;
  return update;
}

/// One block, a thread a lane.
__global__ void __launch_bounds__(kLanes) clip_scale_kernel(const __grid_constant__ ClipArguments args) {
  __shared__ double lanes[kLanes];
  const int lane = static_cast<int>(threadIdx.x), shift = static_cast<int>(args.before % kLanes);
  double sum = args.before == 0 ? 0.0 : args.lanes[lane];
  for (int i = (lane - shift + kLanes) % kLanes; i < args.list.chunks; i += kLanes) {
    const Chunk element = chunk_at<1>(args.list, i);
    sum += args.list.tensor[element.tensor].sums[element.begin];
  }
  if (!args.last) {
    args.lanes[lane] = sum;
    return;
  }
  lanes[lane] = sum;
  for (int half = kLanes / 2; half > 0; half /= 2) {
    __syncthreads();
    if (lane < half) lanes[lane] += lanes[lane + half];
  }
  if (lane == 0) *args.update = update_from(*args.stats, args.step->clip_norm, lanes[0]);
}

// stats (4) f64, step (16) u32, sums (any count) f64 each -> update (4) f32
Launch prepare_clip_scale(const OpInstance& op, CudaContext& context) {
  auto kernel = load_kernel<ClipArguments>(clip_scale_kernel, dim3(kLanes), context.multiprocessors);
  std::int64_t total = 0;
  for (const Operand& sums : std::span(op.inputs).subspan(2)) total += sums.count();
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    ClipArguments args{};
    args.lanes = static_cast<double*>(exec.workspace);
    args.stats = static_cast<const LossStats*>(in[0].data);
    args.step = static_cast<const StepState*>(in[1].data);
    args.update = static_cast<UpdateState*>(out[0].data);
    auto array_at = [&](std::size_t i) {
      return SumsArray{static_cast<const double*>(in[2 + i].data), in[2 + i].count()};
    };
    for_tensor_lists<1>(in.size() - 2, array_at, [&](const SumsList& list) {
      args.list = list;
      args.last = args.before + list.chunks == total;
      kernel.launch(1, stream_of(exec), args);
      args.before += list.chunks;
    });
  };
}

OpSupport query_clip_scale(const OpInstance& op, const CudaTraits&) {
  return operands::check_clip_scale(op).support(op.inputs.size() > 2 + SumsList::kMost ? kLanes * sizeof(double) : 0);
}

}  // namespace

void add_optimizer_ops(OpTable& table) {
  table["sum_squares"] = {prepare_sum_squares, query_sum_squares};
  table["clip_scale"] = {prepare_clip_scale, query_clip_scale};
  add_element_update_ops(table);
  add_adamw_8bit_op(table);
  add_muon_ops(table);
}

}  // namespace quern::cuda
