// observe_scale: statistics of a tensor's values and of their loss under its scales, and the same of the
// loss's quantized logits' gradients. Threads count what they see; sums are of integers and maxima, so that the order
// of blocks does not matter.

#include "primitives/vector.cuh"
#include "quantization/line_format.cuh"
#include "quantization/observe.h"
#include "quantization/quantize_ops.h"
#include "quantization/quantize_plan.cuh"
#include "quern/block_scales.h"
#include "runtime/launch.cuh"
#include "runtime/operand_check.h"
#include "shared/operands/op_checks.h"

namespace quern::cuda {

namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMostBlocks = 1024;

/// Magnitudes up to this one become zero: half of the smallest code, which a tie rounds down from.
__device__ __forceinline__ float vanishing(DType format) {
  return format == DType::e4m3 ? 0x1p-10f : format == DType::e5m2 ? 0x1p-17f : 0.5f;
}

struct Seen {
  float amax, largest_scale, smallest_scale;
  unsigned long long elements, underflowed, clipped, non_finite;
};

__device__ __forceinline__ Seen nothing() { return {0, 0, __builtin_huge_valf(), 0, 0, 0, 0}; }

/// All threads of a block call it. Magnitudes and scales are not negative, so their bits are in their order.
__device__ void add(const Seen& seen, ScaleObservation& into) {
  __shared__ Seen block;
  if (threadIdx.x == 0) block = nothing();
  __syncthreads();
  auto largest = [](float value, float& of) {
    const unsigned most = __reduce_max_sync(~0u, __float_as_uint(value));
    if (threadIdx.x % 32 == 0) atomicMax(reinterpret_cast<unsigned*>(&of), most);
  };
  auto sum = [](unsigned long long value, unsigned long long& of) {
    for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(~0u, value, lanes);
    if (threadIdx.x % 32 == 0) atomicAdd(&of, value);
  };
  largest(seen.amax, block.amax);
  largest(seen.largest_scale, block.largest_scale);
  const unsigned least = __reduce_min_sync(~0u, __float_as_uint(seen.smallest_scale));
  if (threadIdx.x % 32 == 0) atomicMin(reinterpret_cast<unsigned*>(&block.smallest_scale), least);
  sum(seen.elements, block.elements);
  sum(seen.underflowed, block.underflowed);
  sum(seen.clipped, block.clipped);
  sum(seen.non_finite, block.non_finite);
  __syncthreads();
  if (threadIdx.x != 0) return;
  auto bits = [](float& value) { return reinterpret_cast<unsigned*>(&value); };
  auto count = [](std::uint64_t& value) { return reinterpret_cast<unsigned long long*>(&value); };
  atomicMax(bits(into.amax), __float_as_uint(block.amax));
  atomicMax(bits(into.largest_scale), __float_as_uint(block.largest_scale));
  atomicMin(bits(into.smallest_scale), __float_as_uint(block.smallest_scale));
  atomicAdd(count(into.elements), block.elements);
  atomicAdd(count(into.underflowed), block.underflowed);
  atomicAdd(count(into.clipped), block.clipped);
  atomicAdd(count(into.non_finite), block.non_finite);
}

__global__ void begin_kernel(ScaleObservation* seen) {
  *seen = {};
  seen->smallest_scale = __builtin_huge_valf();
}

struct ObserveArguments {
  const void* x;  ///< (N, C)
  const float* scales;
  const ScaleState* state;  ///< of a delayed scale, or null
  ScaleObservation* seen;
  std::int64_t rows;
  int columns;
  ScaleLayout layout;
  DType format;
  float largest;  ///< of the format
};

/// Blocks take rows in turn.
template <class T, Access kAccess>
__global__ void __launch_bounds__(kThreads) observe_kernel(const ObserveArguments args) {
  const float zero_below = vanishing(args.format), largest = args.largest;
  const float assumed = args.state ? args.state->assumed : 0;
  Seen seen = nothing();
  for (std::int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
    const T* x = static_cast<const T*>(args.x) + row * args.columns;
    for (int column = static_cast<int>(threadIdx.x) * kPack<T>; column < args.columns; column += kThreads * kPack<T>) {
      const Floats<T> values = unpack(load_pack<kAccess>(x, column, args.columns));
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) {
        if (column + i >= args.columns) break;
        const float value = fabsf(values.at[i]);
        const float scale = args.scales[scale_index(args.layout, row, column + i, args.rows, args.columns)];
        const float limit = args.state ? (assumed > 0 ? assumed * largest : __builtin_huge_valf()) : scale * largest;
        ++seen.elements;
        if (!isfinite(value) || !isfinite(scale)) {
          ++seen.non_finite;
          continue;
        }
        if (value == 0) continue;  // a part that is all zero has a scale that says nothing
        seen.amax = fmaxf(seen.amax, value);
        seen.largest_scale = fmaxf(seen.largest_scale, scale);
        seen.smallest_scale = fminf(seen.smallest_scale, scale);
        seen.underflowed += value * __fdiv_rn(1.0f, scale) <= zero_below;
        seen.clipped += value > limit;
      }
    }
  }
  add(seen, *args.seen);
}

struct CodesArguments {
  ObservedCodes of;
  ScaleObservation* seen;
};

__global__ void __launch_bounds__(kThreads) observe_codes_kernel(const CodesArguments args) {
  const ObservedCodes& of = args.of;
  const unsigned largest_finite = of.format == DType::e4m3 ? 0x7eu : 0x7bu;
  Seen seen = nothing();
  unsigned largest = 0;
  for (std::int64_t row = blockIdx.x; row < of.rows; row += gridDim.x) {
    if (of.targets[row] < 0) continue;
    const std::uint8_t* codes = of.codes + row * of.columns;
    for (std::int64_t column = threadIdx.x; column < of.columns; column += kThreads) {
      const unsigned magnitude = codes[column] & 0x7fu;
      ++seen.elements;
      if (magnitude <= largest_finite)
        largest = max(largest, magnitude);
      else
        ++seen.non_finite;
      seen.underflowed += magnitude == 0;
    }
  }
  const auto kind = of.format == DType::e4m3 ? __NV_E4M3 : __NV_E5M2;
  seen.amax = __half2float(__half(__nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(largest), kind))) * of.scale;
  seen.largest_scale = seen.smallest_scale = of.scale;
  add(seen, *args.seen);
}

Launch prepare(const OpInstance& op, CudaContext& context) {
  const Matrix size = matrix_of(op, 0);
  const DType type = op.inputs[0].dtype;
  const QuantizedFormat format = *quantized_format_named(op.attributes.word("format"));
  const ScaleLayout layout = *scale_layout_named(op.attributes.word("layout"));
  const bool add = op.outputs[0].accumulate, delayed = op.inputs.size() > 2 && op.inputs[2].present;
  const bool whole = size.columns * static_cast<std::int64_t>(size_of(type)) % 16 == 0;
  auto load = [&](auto access) {
    return with_element(type, [&](auto element) {
      KernelFunction<ObserveArguments> kernel = observe_kernel<decltype(element), access()>;
      return load_kernel(kernel, dim3(kThreads), context.multiprocessors);
    });
  };
  const auto vector = load(AccessConstant<Access::vector>{}), scalar = load(AccessConstant<Access::scalar>{});
  load_observations();
  const std::int64_t blocks = std::min(size.rows, kMostBlocks);
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    const ObserveArguments args{.x = in[0].data,
                                .scales = in[1].as<float>(),
                                .state = delayed ? in[2].as<ScaleState>() : nullptr,
                                .seen = out[0].as<ScaleObservation>(),
                                .rows = size.rows,
                                .columns = static_cast<int>(size.columns),
                                .layout = layout,
                                .format = format.dtype,
                                .largest = format.largest};
    if (!add) begin_observation(args.seen, stream_of(exec));
    if (blocks > 0) (whole && aligned_16({args.x}) ? vector : scalar).launch(blocks, stream_of(exec), args);
  };
}

}  // namespace

void load_observations() {
  load_kernel<ScaleObservation*>(begin_kernel, dim3(1), 1);
  load_kernel<CodesArguments>(observe_codes_kernel, dim3(kThreads), 1);
}

void begin_observation(ScaleObservation* seen, cudaStream_t stream) {
  begin_kernel<<<1, 1, 0, stream>>>(seen);
  QUERN_CUDA(cudaGetLastError());
}

void observe_codes(const ObservedCodes& of, ScaleObservation* seen, cudaStream_t stream) {
  if (of.rows == 0) return;
  const auto blocks = static_cast<unsigned>(std::min(of.rows, kMostBlocks));
  observe_codes_kernel<<<blocks, kThreads, 0, stream>>>({of, seen});
  QUERN_CUDA(cudaGetLastError());
}

void add_observe_op(OpTable& table) {
  table["observe_scale"] = {prepare,
                            [](const OpInstance& op, const CudaTraits&) { return operands::query_observe_scale(op); }};
}

}  // namespace quern::cuda
