// The global gradient norm and the clip factor, on the device: no host synchronisation decides whether a step is
// applied.

#include <cmath>
#include <vector>

#include "launch.cuh"
#include "operand_check.h"
#include "optimizer_ops.h"
#include "quern/step_state.h"
#include "tensor_list.cuh"
#include "vector.cuh"

namespace quern::cuda {

namespace {

// ---- sum_squares ----

constexpr int kThreads = 256, kUnroll = 4, kTotalThreads = 1024;
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
template <int kBlock>
__device__ __forceinline__ double block_sum(double value) {
  __shared__ double warps[kBlock / 32];
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(0xffffffffu, value, lanes);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = 0;
  for (int warp = 0; warp < kBlock / 32; ++warp) value += warps[warp];
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
  sum = block_sum<kThreads>(sum);
  if (threadIdx.x == 0) args.partials[blockIdx.x] = sum;
}

struct TotalArguments {
  const double* partials;
  int count;
  double* sum;
};

__global__ void __launch_bounds__(kTotalThreads) total_kernel(const TotalArguments args) {
  double sum = 0;
#pragma unroll 8
  for (int i = static_cast<int>(threadIdx.x); i < args.count; i += kTotalThreads) sum += args.partials[i];
  sum = block_sum<kTotalThreads>(sum);
  if (threadIdx.x == 0) *args.sum = sum;
}

std::int64_t partials_of(const OpInstance& op) {
  std::int64_t partials = 0;
  for (const Operand& x : op.inputs) partials += ceil_divide(element_count(x.extents), kChunk);
  return partials;
}

// x (any), as many as there are -> sum (1) f64 over all
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
  auto total = load_kernel<TotalArguments>(total_kernel, dim3(kTotalThreads), context.multiprocessors);
  const int partials = static_cast<int>(partials_of(op));
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    auto* sums = static_cast<double*>(exec.workspace);
    bool aligned = true;
    for (const View& x : in) aligned = aligned && aligned_16({x.data});
    SquaresArguments args;
    args.partials = sums;
    auto tensor_at = [&](std::size_t i) { return SquaresTensor{in[i].data, counts[i]}; };
    for_tensor_lists<kChunk>(counts.size(), tensor_at, [&](const TensorList<SquaresTensor>& list) {
      args.list = list;
      (aligned ? vector : scalar).launch(list.chunks, stream_of(exec), args);
      args.partials += list.chunks;
    });
    total.launch(1, stream_of(exec), {sums, partials, static_cast<double*>(out[0].data)});
  };
}

OpSupport query_sum_squares(const OpInstance& op, const CudaTraits&) {
  OperandCheck check(op, std::max<std::size_t>(op.inputs.size(), 1), 1);
  check.output(0, "sum", {1}, DType::f64);
  for (std::size_t i = 0; i < op.inputs.size(); ++i) check.input(i, "x", op.inputs[i].extents);
  return check.support(static_cast<std::size_t>(partials_of(op)) * sizeof(double));
}

// ---- clip_scale ----

constexpr int kMostSums = 448;  // sums of one launch: a kernel's arguments are limited to 4 KiB

struct ClipArguments {
  const double* sums[kMostSums];
  int count;
  double* running;  ///< total of the chunks before; null: this is the only chunk
  bool first, last;
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

/// One block. The sums are read at once and added in their order by one thread.
__global__ void __launch_bounds__(kMostSums) clip_scale_kernel(const __grid_constant__ ClipArguments args) {
  __shared__ double sums[kMostSums];
  const int i = static_cast<int>(threadIdx.x);
  if (i < args.count) sums[i] = *args.sums[i];
  __syncthreads();
  if (i != 0) return;
  double squares = args.first ? 0.0 : *args.running;
  for (int sum = 0; sum < args.count; ++sum) squares += sums[sum];
  if (args.last) {
    *args.update = update_from(*args.stats, args.step->clip_norm, squares);
  } else {
    *args.running = squares;
  }
}

std::size_t running_bytes(std::size_t sums) { return sums > kMostSums ? sizeof(double) : 0; }

// stats (4) f64, step (16) u32, sums (1) f64 each -> update (4) f32
Launch prepare_clip_scale(const OpInstance&, CudaContext& context) {
  auto kernel = load_kernel<ClipArguments>(clip_scale_kernel, dim3(kMostSums), context.multiprocessors);
  return [kernel](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    std::span<const View> sums = in.subspan(2);
    std::size_t done = 0;
    do {
      ClipArguments args{};
      args.count = static_cast<int>(std::min<std::size_t>(kMostSums, sums.size() - done));
      for (int i = 0; i < args.count; ++i)
        args.sums[i] = static_cast<const double*>(sums[done + static_cast<std::size_t>(i)].data);
      args.first = done == 0;
      done += static_cast<std::size_t>(args.count);
      args.last = done == sums.size();
      args.running = static_cast<double*>(exec.workspace);
      args.stats = static_cast<const LossStats*>(in[0].data);
      args.step = static_cast<const StepState*>(in[1].data);
      args.update = static_cast<UpdateState*>(out[0].data);
      kernel.launch(1, stream_of(exec), args);
    } while (done < sums.size());
  };
}

OpSupport query_clip_scale(const OpInstance& op, const CudaTraits&) {
  OpSupport support;
  auto expect = [&](const Operand& operand, const char* name, DType dtype, std::int64_t count) {
    if (!support.refusal.empty() || (operand.present && operand.dtype == dtype && operand.count() == count)) return;
    support.refusal = op.kind + " operand " + name + ": found " + std::string(name_of(operand.dtype)) + " " +
                      to_string(operand.extents) + ", expected " + std::string(name_of(dtype)) + " (" +
                      std::to_string(count) + ")";
  };
  if (op.inputs.size() < 3 || op.outputs.size() != 1)
    return {op.kind + " takes stats, step and sums, and has one output", 0};
  expect(op.inputs[0], "stats", DType::f64, 4);
  expect(op.inputs[1], "step", DType::u32, 16);
  for (std::size_t i = 2; i < op.inputs.size(); ++i) expect(op.inputs[i], "sums", DType::f64, 1);
  expect(op.outputs[0], "update", DType::f32, 4);
  if (op.outputs[0].accumulate) support.refusal = op.kind + " operand update: cannot be added to";
  if (support.refusal.empty()) support.workspace_bytes = running_bytes(op.inputs.size() - 2);
  return support;
}

}  // namespace

void add_optimizer_ops(OpTable& table) {
  table["sum_squares"] = {prepare_sum_squares, query_sum_squares};
  table["clip_scale"] = {prepare_clip_scale, query_clip_scale};
  add_adamw_op(table);
}

}  // namespace quern::cuda
