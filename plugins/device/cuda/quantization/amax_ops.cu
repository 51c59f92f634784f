// amax: the largest magnitude of each of many tensors; quantize_amax: quantizes with a scale from a given amax.
// With these ranks quantize a matrix of which each has some rows.

#include <cuda_runtime_api.h>

#include "primitives/scale.cuh"
#include "primitives/tensor_list.cuh"
#include "primitives/vector.cuh"
#include "quantization/quantize_ops.h"
#include "quantization/quantize_plan.cuh"
#include "runtime/launch.cuh"
#include "runtime/operand_check.h"

namespace quern::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kChunk = 64 * kThreads;  // elements of a block

struct AmaxTensor {
  const void* x;
  std::int64_t count;
  float* amax;
};

struct AmaxArguments {
  TensorList<AmaxTensor> list;
  DType format;
};

/// Magnitudes are compared by their bits, which have their order, so that it does not matter who comes first.
template <class T, Access kAccess>
__global__ void __launch_bounds__(kThreads) amax_kernel(const __grid_constant__ AmaxArguments args) {
  const Chunk chunk = chunk_at<kChunk>(args.list, static_cast<int>(blockIdx.x));
  const AmaxTensor& tensor = args.list.tensor[chunk.tensor];
  const T* x = static_cast<const T*>(tensor.x);
  float amax = 0;
  for (std::int64_t at = chunk.begin + threadIdx.x * kPack<T>; at < chunk.end; at += kThreads * kPack<T>) {
    const Floats<T> values = unpack(load_pack<kAccess>(x, at, chunk.end));
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) amax = fmaxf(amax, fabsf(values.at[i]));
    if (loses_nan(values.at, args.format)) amax = __uint_as_float(0x7f800000u);
  }
  const unsigned bits = __reduce_max_sync(~0u, __float_as_uint(amax));
  if (threadIdx.x % 32 == 0 && bits > 0) atomicMax(reinterpret_cast<unsigned*>(tensor.amax), bits);
}

// x (any), n tensors -> amaxes (n) f32
Launch prepare_amax(const OpInstance& op, CudaContext& context) {
  const DType format = *dtype_named(op.attributes.word("format"));
  auto load = [&](auto access) {
    return with_element(op.inputs[0].dtype, [&](auto element) {
      KernelFunction<AmaxArguments> kernel = amax_kernel<decltype(element), access()>;
      return load_kernel(kernel, dim3(kThreads), context.multiprocessors);
    });
  };
  auto vector = load(AccessConstant<Access::tail>{}), scalar = load(AccessConstant<Access::scalar>{});
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    bool aligned = true;
    for (const View& x : in) aligned = aligned && aligned_16({x.data});
    QUERN_CUDA(cudaMemsetAsync(out[0].data, 0, out[0].bytes(), stream_of(exec)));
    auto tensor_at = [&](std::size_t i) { return AmaxTensor{in[i].data, in[i].count(), out[0].as<float>() + i}; };
    for_tensor_lists<kChunk>(in.size(), tensor_at, [&](const TensorList<AmaxTensor>& list) {
      (aligned ? vector : scalar).launch(list.chunks, stream_of(exec), AmaxArguments{list, format});
    });
  };
}

OpSupport query_amax(const OpInstance& op, const CudaTraits&) {
  OperandCheck check(op, std::max<std::size_t>(op.inputs.size(), 1), 1);
  check_format(check, op);
  check.output(0, "amaxes", {static_cast<std::int64_t>(op.inputs.size())}, DType::f32);
  for (std::size_t i = 0; i < op.inputs.size(); ++i) check.input(i, "x", op.inputs[i].extents);
  return check.support();
}

// ---- the scale of an amax ----

struct ScaleArguments {
  const float* amax;
  float* scale;
  DType format;
};

__global__ void scale_kernel(const ScaleArguments args) { *args.scale = format_scale(*args.amax, args.format); }

}  // namespace

Launch scale_first(const OpInstance& op, CudaContext& context, Launch codes) {
  const DType format = *dtype_named(op.attributes.word("format"));
  auto kernel = load_kernel<ScaleArguments>(scale_kernel, dim3(1), context.multiprocessors);
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    kernel.launch(1, stream_of(exec), {in[1].as<const float>(), out[1].as<float>(), format});
    codes(in.first(1), out, exec);
  };
}

void add_amax_op(OpTable& table) { table["amax"] = {prepare_amax, query_amax}; }

}  // namespace quern::cuda
