// AdamW: Loshchilov & Hutter, "Decoupled Weight Decay Regularization" (2019). The parameter update uses the moments
// before they are rounded for storage. bf16 masters and moments round stochastically; a draw depends on the element's
// global index, so shards agree with the whole. Learning rate, step and clip factor are read from device memory. One
// launch updates many tensors.

#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "optimizer/optimizer_ops.h"
#include "primitives/philox.cuh"
#include "primitives/tensor_list.cuh"
#include "primitives/vector.cuh"
#include "quern/step_state.h"
#include "runtime/launch.cuh"
#include "runtime/operand_check.h"
#include "shared/operands/op_checks.h"

namespace quern::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kRun = 8;  // consecutive elements of a thread: two random blocks
constexpr int kChunk = 8 * kThreads * kRun;

struct AdamwTensor {
  const void* gradient;
  void *master, *moment1, *moment2;  ///< updated in place
  std::int64_t count;
  std::uint64_t first_block;  ///< random block of element 0
  std::uint32_t object;
};

struct AdamwArguments {
  TensorList<AdamwTensor> list;
  const UpdateState* update;
  const StepState* step;
  double beta1, beta2, weight_decay, rate;
  float eps;
  DType gradient_dtype, master_dtype, moment1_dtype, moment2_dtype;  ///< for elements one by one
};

/// What one update needs beside the tensors.
struct AdamwStep {
  float gradient_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, keep, rate, inverse_root2, eps;
  std::uint32_t apply, step, seed_low, seed_high;
};

__device__ double power(double base, std::uint64_t exponent) {
  double result = 1.0;
  for (; exponent > 0; exponent >>= 1, base *= base)
    if (exponent & 1) result *= base;
  return result;
}

__device__ AdamwStep adamw_step(const AdamwArguments& args) {
  const StepState& state = *args.step;
  const std::uint64_t count = std::uint64_t{state.updates} + 1;
  const double learning_rate = state.learning_rate * args.rate;
  AdamwStep s;
  s.gradient_scale = args.update->gradient_scale;
  s.beta1 = static_cast<float>(args.beta1);
  s.one_minus_beta1 = static_cast<float>(1 - args.beta1);
  s.beta2 = static_cast<float>(args.beta2);
  s.one_minus_beta2 = static_cast<float>(1 - args.beta2);
  s.keep = static_cast<float>(1 - learning_rate * args.weight_decay);
  s.rate = static_cast<float>(learning_rate / (1 - power(args.beta1, count)));   // with the first bias correction
  s.inverse_root2 = static_cast<float>(1 / sqrt(1 - power(args.beta2, count)));  // the second
  s.eps = args.eps;
  s.apply = args.update->apply != 0;
  s.step = state.step;
  s.seed_low = state.seed_low;
  s.seed_high = state.seed_high;
  return s;
}

struct Element {
  float master, moment1, moment2;
};

__device__ __forceinline__ Element update(const AdamwStep& s, float gradient, const Element& old) {
  const float g = gradient * s.gradient_scale;
  const float m = s.beta1 * old.moment1 + s.one_minus_beta1 * g;
  const float v = s.beta2 * old.moment2 + s.one_minus_beta2 * g * g;
  return {s.keep * old.master - s.rate * m / (sqrtf(v) * s.inverse_root2 + s.eps), m, v};
}

// ---- runs of elements ----

/// kRun elements of a tensor as they are in memory.
template <class T>
struct Run {
  Pack<T> pack[kRun / kPack<T>];
};

template <class T>
__device__ __forceinline__ Run<T> load_run(const void* tensor, std::int64_t at, std::int64_t count) {
  Run<T> run;
#pragma unroll
  for (int p = 0; p < kRun / kPack<T>; ++p)
    run.pack[p] = load_pack<Access::tail>(static_cast<const T*>(tensor), at + p * kPack<T>, count);
  return run;
}

template <class T>
__device__ __forceinline__ void unpack_run(const Run<T>& run, float (&values)[kRun]) {
#pragma unroll
  for (int p = 0; p < kRun / kPack<T>; ++p) {
    const Floats<T> part = unpack(run.pack[p]);
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) values[p * kPack<T> + i] = part.at[i];
  }
}

/// Writes a run: bf16 rounds stochastically.
template <class T>
__device__ __forceinline__ void store_run(void* to, std::int64_t at, const float (&values)[kRun],
                                          const AdamwTensor& tensor, const AdamwStep& s, RandomPurpose purpose) {
  Run<T> run;
  if constexpr (std::is_same_v<T, bf16>) {
#pragma unroll
    for (int block = 0; block < kRun / 4; ++block) {
      const RandomWords random =
          random_words(s.seed_low, s.seed_high, purpose, tensor.object, s.step,
                       tensor.first_block + static_cast<std::uint64_t>(at) / 4 + static_cast<std::uint64_t>(block));
#pragma unroll
      for (int i = 0; i < 4; i += 2)
        run.pack[0].word[block * 2 + i / 2] =
            upper_halves(stochastic_bits(values[block * 4 + i], random.word[i]),
                         stochastic_bits(values[block * 4 + i + 1], random.word[i + 1]));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kRun; ++i) run.pack[i / 4].word[i % 4] = __float_as_uint(values[i]);
  }
#pragma unroll
  for (int p = 0; p < kRun / kPack<T>; ++p)
    store_pack<Access::tail>(static_cast<T*>(to), at + p * kPack<T>, tensor.count, run.pack[p]);
}

template <class Gradient, class Master, class Moment>
__device__ __forceinline__ void update_run(const AdamwTensor& tensor, const AdamwStep& s, std::int64_t at) {
  const Run<Gradient> gradient_run = load_run<Gradient>(tensor.gradient, at, tensor.count);
  const Run<Master> master_run = load_run<Master>(tensor.master, at, tensor.count);
  const Run<Moment> moment1_run = load_run<Moment>(tensor.moment1, at, tensor.count);
  const Run<Moment> moment2_run = load_run<Moment>(tensor.moment2, at, tensor.count);
  float gradient[kRun], master[kRun], moment1[kRun], moment2[kRun];
  unpack_run(gradient_run, gradient);
  unpack_run(master_run, master);
  unpack_run(moment1_run, moment1);
  unpack_run(moment2_run, moment2);
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    const Element fresh = update(s, gradient[i], {master[i], moment1[i], moment2[i]});
    master[i] = fresh.master;
    moment1[i] = fresh.moment1;
    moment2[i] = fresh.moment2;
  }
  store_run<Master>(tensor.master, at, master, tensor, s, RandomPurpose::round_master);
  store_run<Moment>(tensor.moment1, at, moment1, tensor, s, RandomPurpose::round_moment1);
  store_run<Moment>(tensor.moment2, at, moment2, tensor, s, RandomPurpose::round_moment2);
}

template <class Gradient, class Master, class Moment>
__global__ void __launch_bounds__(kThreads) adamw_kernel(const __grid_constant__ AdamwArguments args) {
  __shared__ AdamwStep shared;
  if (threadIdx.x == 0) shared = adamw_step(args);
  __syncthreads();
  const AdamwStep s = shared;
  if (s.apply == 0) return;
  for (int index = static_cast<int>(blockIdx.x); index < args.list.chunks; index += static_cast<int>(gridDim.x)) {
    const Chunk chunk = chunk_at<kChunk>(args.list, index);
    const AdamwTensor tensor = args.list.tensor[chunk.tensor];
    for (std::int64_t at = chunk.begin + threadIdx.x * kRun; at < chunk.end; at += kThreads * kRun)
      update_run<Gradient, Master, Moment>(tensor, s, at);
  }
}

// ---- elements one by one: any address, any mix of dtypes ----

__device__ __forceinline__ float load_element(const void* tensor, DType dtype, std::int64_t at) {
  return dtype == DType::f32 ? static_cast<const float*>(tensor)[at] : to_float(static_cast<const bf16*>(tensor)[at]);
}

__device__ __forceinline__ void store_element(void* tensor, DType dtype, std::int64_t at, float value,
                                              const AdamwTensor& facts, const AdamwStep& s, RandomPurpose purpose) {
  if (dtype == DType::f32) {
    static_cast<float*>(tensor)[at] = value;
    return;
  }
  const RandomWords random = random_words(s.seed_low, s.seed_high, purpose, facts.object, s.step,
                                          facts.first_block + static_cast<std::uint64_t>(at) / 4);
  const std::uint32_t pair =
      at % 4 < 2 ? (at % 2 == 0 ? random.word[0] : random.word[1]) : (at % 2 == 0 ? random.word[2] : random.word[3]);
  write_bits(static_cast<bf16*>(tensor) + at, stochastic_bits(value, pair) >> 16);
}

__global__ void __launch_bounds__(kThreads) adamw_elements_kernel(const __grid_constant__ AdamwArguments args) {
  __shared__ AdamwStep shared;
  if (threadIdx.x == 0) shared = adamw_step(args);
  __syncthreads();
  const AdamwStep s = shared;
  if (s.apply == 0) return;
  for (int index = static_cast<int>(blockIdx.x); index < args.list.chunks; index += static_cast<int>(gridDim.x)) {
    const Chunk chunk = chunk_at<kChunk>(args.list, index);
    const AdamwTensor tensor = args.list.tensor[chunk.tensor];
    for (std::int64_t at = chunk.begin + threadIdx.x; at < chunk.end; at += kThreads) {
      const Element old{load_element(tensor.master, args.master_dtype, at),
                        load_element(tensor.moment1, args.moment1_dtype, at),
                        load_element(tensor.moment2, args.moment2_dtype, at)};
      const Element fresh = update(s, load_element(tensor.gradient, args.gradient_dtype, at), old);
      store_element(tensor.master, args.master_dtype, at, fresh.master, tensor, s, RandomPurpose::round_master);
      store_element(tensor.moment1, args.moment1_dtype, at, fresh.moment1, tensor, s, RandomPurpose::round_moment1);
      store_element(tensor.moment2, args.moment2_dtype, at, fresh.moment2, tensor, s, RandomPurpose::round_moment2);
    }
  }
}

KernelFunction<AdamwArguments> run_kernel(DType gradient, DType master, DType moment) {
  return with_element(gradient, [&](auto g) {
    return with_element(master, [&](auto p) {
      return with_element(moment, [&](auto m) -> KernelFunction<AdamwArguments> {
        return adamw_kernel<decltype(g), decltype(p), decltype(m)>;
      });
    });
  });
}

/// Indices of tensor i's first input, its gradient, and of its first output.
constexpr std::size_t first_input(std::size_t i) { return 2 + 4 * i; }
constexpr std::size_t first_output(std::size_t i) { return 3 * i; }

/// All but the pointers.
struct AdamwOp {
  AdamwArguments constant{};
  std::vector<AdamwTensor> tensors;
  bool alike = false;  ///< both moments are of one dtype
};

AdamwOp adamw_op(const OpInstance& op) {
  AdamwOp result;
  AdamwArguments& constant = result.constant;
  constant.beta1 = op.attributes.real("beta1");
  constant.beta2 = op.attributes.real("beta2");
  constant.weight_decay = op.attributes.real("weight_decay");
  constant.rate = op.attributes.real_or("rate", 1.0);
  constant.eps = static_cast<float>(op.attributes.real("eps"));
  constant.gradient_dtype = op.inputs[2].dtype;
  constant.master_dtype = op.inputs[3].dtype;
  constant.moment1_dtype = op.inputs[4].dtype;
  constant.moment2_dtype = op.inputs[5].dtype;
  result.alike = constant.moment1_dtype == constant.moment2_dtype;
  const std::vector<double>&objects = op.attributes.list("objects"), &offsets = op.attributes.list("offsets");
  for (std::size_t i = 0; i < objects.size(); ++i) {
    AdamwTensor tensor{};
    tensor.count = element_count(op.inputs[first_input(i)].extents);
    tensor.first_block = static_cast<std::uint64_t>(offsets[i]) / 4;
    tensor.object = static_cast<std::uint32_t>(objects[i]);
    result.tensors.push_back(tensor);
  }
  return result;
}

// update (4) f32, step (16) u32, of each tensor gradient, master, moment1, moment2 (n) -> master, moment1, moment2
Launch prepare_adamw(const OpInstance& op, CudaContext& context) {
  auto prepared = std::make_shared<const AdamwOp>(adamw_op(op));
  const AdamwArguments& constant = prepared->constant;
  auto runs = load_kernel(run_kernel(constant.gradient_dtype, constant.master_dtype, constant.moment1_dtype),
                          dim3(kThreads), context.multiprocessors);
  auto elements = load_kernel<AdamwArguments>(adamw_elements_kernel, dim3(kThreads), context.multiprocessors);
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    bool whole = prepared->alike;
    auto tensor_at = [&](std::size_t i) {
      AdamwTensor tensor = prepared->tensors[i];
      tensor.gradient = in[first_input(i)].data;
      tensor.master = out[first_output(i)].data;
      tensor.moment1 = out[first_output(i) + 1].data;
      tensor.moment2 = out[first_output(i) + 2].data;
      return tensor;
    };
    for (std::size_t i = 0; i < prepared->tensors.size(); ++i) {
      for (std::size_t j = 0; j < 3; ++j)
        if (out[first_output(i) + j].data != in[first_input(i) + 1 + j].data)
          fail_internal("adamw", "output " + std::to_string(first_output(i) + j) + " is not its input's memory");
      const AdamwTensor tensor = tensor_at(i);
      whole = whole && aligned_16({tensor.gradient, tensor.master, tensor.moment1, tensor.moment2});
    }
    AdamwArguments args = prepared->constant;
    args.update = static_cast<const UpdateState*>(in[0].data);
    args.step = static_cast<const StepState*>(in[1].data);
    const auto& kernel = whole ? runs : elements;
    for_tensor_lists<kChunk>(prepared->tensors.size(), tensor_at, [&](const TensorList<AdamwTensor>& list) {
      args.list = list;
      kernel.launch(kernel.persistent(list.chunks), stream_of(exec), args);
    });
  };
}

OpSupport query_adamw(const OpInstance& op, const CudaTraits&) {
  const std::size_t tensors = op.attributes.list("objects").size();
  OperandCheck check(op, first_input(tensors), first_output(tensors), first_input(0));
  check.that(tensors > 0, "needs at least one object");
  operands::check_adamw(check, op);
  for (std::size_t i = first_input(1); check.ok() && i < op.inputs.size(); ++i)
    check.that(op.inputs[i].dtype == op.inputs[i - first_input(1) + first_input(0)].dtype,
               "on cuda takes tensors of the same dtypes");
  return check.support();
}

}  // namespace

void add_adamw_op(OpTable& table) { table["adamw"] = {prepare_adamw, query_adamw}; }

}  // namespace quern::cuda
