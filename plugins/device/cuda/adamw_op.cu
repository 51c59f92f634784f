// AdamW: Loshchilov & Hutter, "Decoupled Weight Decay Regularization" (2019). The parameter update uses the moments
// before they are rounded for storage. bf16 masters and moments round stochastically; a draw depends on the element's
// global index, so shards agree with the whole. Learning rate, step and clip factor are read from device memory.

#include <string>
#include <type_traits>

#include "launch.cuh"
#include "operand_check.h"
#include "optimizer_ops.h"
#include "philox.cuh"
#include "quern/step_state.h"
#include "vector.cuh"

namespace quern::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kRun = 8;  // consecutive elements of a thread: two random blocks

struct AdamwArguments {
  const void* gradient;
  void *master, *moment1, *moment2;  ///< updated in place
  const UpdateState* update;
  const StepState* step;
  std::int64_t count;
  std::uint64_t first_block;  ///< random block of element 0
  std::uint32_t object;
  double beta1, beta2, weight_decay;
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
  const std::uint64_t count = std::uint64_t{state.step} + 1;
  AdamwStep s;
  s.gradient_scale = args.update->gradient_scale;
  s.beta1 = static_cast<float>(args.beta1);
  s.one_minus_beta1 = static_cast<float>(1 - args.beta1);
  s.beta2 = static_cast<float>(args.beta2);
  s.one_minus_beta2 = static_cast<float>(1 - args.beta2);
  s.keep = static_cast<float>(1 - double{state.learning_rate} * args.weight_decay);
  s.rate = static_cast<float>(state.learning_rate / (1 - power(args.beta1, count)));  // with the first bias correction
  s.inverse_root2 = static_cast<float>(1 / sqrt(1 - power(args.beta2, count)));       // the second
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
__device__ __forceinline__ void store_run(void* tensor, std::int64_t at, const float (&values)[kRun],
                                          const AdamwArguments& args, const AdamwStep& s, RandomPurpose purpose) {
  Run<T> run;
  if constexpr (std::is_same_v<T, bf16>) {
#pragma unroll
    for (int block = 0; block < kRun / 4; ++block) {
      const RandomWords random =
          random_words(s.seed_low, s.seed_high, purpose, args.object, s.step,
                       args.first_block + static_cast<std::uint64_t>(at) / 4 + static_cast<std::uint64_t>(block));
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
    store_pack<Access::tail>(static_cast<T*>(tensor), at + p * kPack<T>, args.count, run.pack[p]);
}

template <class Gradient, class Master, class Moment>
__global__ void __launch_bounds__(kThreads) adamw_kernel(const AdamwArguments args) {
  __shared__ AdamwStep shared;
  if (threadIdx.x == 0) shared = adamw_step(args);
  __syncthreads();
  const AdamwStep s = shared;
  if (s.apply == 0) return;
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads * kRun;
  for (std::int64_t at = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * kRun; at < args.count; at += stride) {
    const Run<Gradient> gradient_run = load_run<Gradient>(args.gradient, at, args.count);
    const Run<Master> master_run = load_run<Master>(args.master, at, args.count);
    const Run<Moment> moment1_run = load_run<Moment>(args.moment1, at, args.count);
    const Run<Moment> moment2_run = load_run<Moment>(args.moment2, at, args.count);
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
    store_run<Master>(args.master, at, master, args, s, RandomPurpose::round_master);
    store_run<Moment>(args.moment1, at, moment1, args, s, RandomPurpose::round_moment1);
    store_run<Moment>(args.moment2, at, moment2, args, s, RandomPurpose::round_moment2);
  }
}

// ---- elements one by one: any address, any mix of dtypes ----

__device__ __forceinline__ float load_element(const void* tensor, DType dtype, std::int64_t at) {
  return dtype == DType::f32 ? static_cast<const float*>(tensor)[at] : to_float(static_cast<const bf16*>(tensor)[at]);
}

__device__ __forceinline__ void store_element(void* tensor, DType dtype, std::int64_t at, float value,
                                              const AdamwArguments& args, const AdamwStep& s, RandomPurpose purpose) {
  if (dtype == DType::f32) {
    static_cast<float*>(tensor)[at] = value;
    return;
  }
  const RandomWords random = random_words(s.seed_low, s.seed_high, purpose, args.object, s.step,
                                          args.first_block + static_cast<std::uint64_t>(at) / 4);
  const std::uint32_t pair =
      at % 4 < 2 ? (at % 2 == 0 ? random.word[0] : random.word[1]) : (at % 2 == 0 ? random.word[2] : random.word[3]);
  write_bits(static_cast<bf16*>(tensor) + at, stochastic_bits(value, pair) >> 16);
}

__global__ void __launch_bounds__(kThreads) adamw_elements_kernel(const AdamwArguments args) {
  __shared__ AdamwStep shared;
  if (threadIdx.x == 0) shared = adamw_step(args);
  __syncthreads();
  const AdamwStep s = shared;
  if (s.apply == 0) return;
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t at = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; at < args.count; at += stride) {
    const Element old{load_element(args.master, args.master_dtype, at),
                      load_element(args.moment1, args.moment1_dtype, at),
                      load_element(args.moment2, args.moment2_dtype, at)};
    const Element fresh = update(s, load_element(args.gradient, args.gradient_dtype, at), old);
    store_element(args.master, args.master_dtype, at, fresh.master, args, s, RandomPurpose::round_master);
    store_element(args.moment1, args.moment1_dtype, at, fresh.moment1, args, s, RandomPurpose::round_moment1);
    store_element(args.moment2, args.moment2_dtype, at, fresh.moment2, args, s, RandomPurpose::round_moment2);
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

// gradient, master, moment1, moment2 (n), update (4) f32, step (16) u32 -> master, moment1, moment2 in place
Launch prepare_adamw(const OpInstance& op, CudaContext& context) {
  AdamwArguments constant{};
  constant.count = element_count(op.inputs[1].extents);
  constant.first_block = static_cast<std::uint64_t>(op.attributes.integer("offset")) / 4;
  constant.object = static_cast<std::uint32_t>(op.attributes.integer("object"));
  constant.beta1 = op.attributes.real("beta1");
  constant.beta2 = op.attributes.real("beta2");
  constant.weight_decay = op.attributes.real("weight_decay");
  constant.eps = static_cast<float>(op.attributes.real("eps"));
  constant.gradient_dtype = op.inputs[0].dtype;
  constant.master_dtype = op.inputs[1].dtype;
  constant.moment1_dtype = op.inputs[2].dtype;
  constant.moment2_dtype = op.inputs[3].dtype;
  const bool alike = constant.moment1_dtype == constant.moment2_dtype;
  auto runs = load_kernel(run_kernel(constant.gradient_dtype, constant.master_dtype, constant.moment1_dtype),
                          dim3(kThreads), context.multiprocessors);
  auto elements = load_kernel<AdamwArguments>(adamw_elements_kernel, dim3(kThreads), context.multiprocessors);
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    for (std::size_t i = 0; i < 3; ++i)
      if (out[i].data != in[i + 1].data)
        fail_internal("adamw", "output " + std::to_string(i) + " is not its input's memory");
    if (constant.count == 0) return;
    AdamwArguments args = constant;
    args.gradient = in[0].data;
    args.master = out[0].data;
    args.moment1 = out[1].data;
    args.moment2 = out[2].data;
    args.update = static_cast<const UpdateState*>(in[4].data);
    args.step = static_cast<const StepState*>(in[5].data);
    bool whole = alike && aligned_16({args.gradient, args.master, args.moment1, args.moment2});
    const auto& kernel = whole ? runs : elements;
    kernel.launch(kernel.persistent(ceil_divide(args.count, whole ? kThreads * kRun : kThreads)), stream_of(exec),
                  args);
  };
}

OpSupport query_adamw(const OpInstance& op, const CudaTraits&) {
  static constexpr const char* kNames[] = {"master", "moment1", "moment2"};
  auto is_element = [](DType type) { return type == DType::f32 || type == DType::bf16; };
  OperandCheck check(op, 6, 3);
  std::int64_t offset = op.attributes.integer("offset");
  check.that(offset % 4 == 0 && offset >= 0, "offset: found " + std::to_string(offset) + ", expected a multiple of 4");
  Extents extents = extents_of(op, 1);
  check.input(0, "gradient", extents);
  for (std::size_t i = 0; i < 3 && check.ok(); ++i) {
    DType dtype = op.inputs[i + 1].dtype;
    check.that(is_element(dtype), std::string("operand ") + kNames[i] + ": found " + std::string(name_of(dtype)) +
                                      ", expected f32 or bf16");
    check.input(i + 1, kNames[i], extents, dtype).output(i, kNames[i], extents, dtype);
  }
  return check.input(4, "update", {4}, DType::f32).input(5, "step", {16}, DType::u32).support();
}

}  // namespace

void add_adamw_op(OpTable& table) { table["adamw"] = {prepare_adamw, query_adamw}; }

}  // namespace quern::cuda
