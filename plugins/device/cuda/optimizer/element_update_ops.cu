// Updates of elements one by one: AdamW, SGD with momentum, Lion, schedule-free AdamW. The master's update uses the
// states before they are rounded for storage. bf16 masters and states round stochastically; a draw depends on the
// element's global index, so shards agree with the whole. Learning rate, step and clip factor are read from device
// memory. One launch updates many tensors.

#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "optimizer/optimizer_ops.h"
#include "optimizer/update_rules.cuh"
#include "primitives/philox.cuh"
#include "primitives/tensor_list.cuh"
#include "primitives/vector.cuh"
#include "runtime/launch.cuh"
#include "runtime/operand_check.h"
#include "shared/operands/op_checks.h"

namespace quern::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kRun = 8;  // consecutive elements of a thread: two random blocks
constexpr int kChunk = 8 * kThreads * kRun;

/// Tensors of one object that are updated in place: the master, and the states.
template <class Rule>
inline constexpr int kUpdated = 1 + Rule::kStates;

template <class Rule>
struct UpdateTensor {
  const void* gradient;
  void* updated[kUpdated<Rule>];
  std::int64_t count;
  std::uint64_t first_block;  ///< random block of element 0
  std::uint32_t object;
};

template <class Rule>
struct UpdateArguments {
  TensorList<UpdateTensor<Rule>> list;
  const UpdateState* update;
  const StepState* step;
  typename Rule::Constants constants;
  DType gradient_dtype, dtypes[kUpdated<Rule>];  ///< for elements one by one
};

template <class Rule>
struct UpdateStep {
  typename Rule::Step rule;
  DrawStep draw;
};

template <class Rule>
__device__ __forceinline__ UpdateStep<Rule> update_step(const UpdateArguments<Rule>& args) {
  __shared__ UpdateStep<Rule> shared;
  if (threadIdx.x == 0)
    shared = {Rule::step(args.constants, *args.update, *args.step), draw_step(*args.update, *args.step)};
  __syncthreads();
  return shared;
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
template <class T, class Rule>
__device__ __forceinline__ void store_run(std::int64_t at, const float (&values)[kRun],
                                          const UpdateTensor<Rule>& tensor, const DrawStep& s, int index) {
  Run<T> run;
  if constexpr (std::is_same_v<T, bf16>) {
#pragma unroll
    for (int block = 0; block < kRun / 4; ++block) {
      const RandomWords random =
          random_words(s.seed_low, s.seed_high, rounding(index), tensor.object, s.step,
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
    store_pack<Access::tail>(static_cast<T*>(tensor.updated[index]), at + p * kPack<T>, tensor.count, run.pack[p]);
}

template <class Rule, class Gradient, class Master, class State>
__device__ __forceinline__ void update_run(const UpdateTensor<Rule>& tensor, const UpdateStep<Rule>& s,
                                           std::int64_t at) {
  const Run<Gradient> gradient_run = load_run<Gradient>(tensor.gradient, at, tensor.count);
  const Run<Master> master_run = load_run<Master>(tensor.updated[0], at, tensor.count);
  Run<State> state_runs[Rule::kStates];
#pragma unroll
  for (int j = 0; j < Rule::kStates; ++j) state_runs[j] = load_run<State>(tensor.updated[1 + j], at, tensor.count);
  float gradient[kRun], values[kUpdated<Rule>][kRun];
  unpack_run(gradient_run, gradient);
  unpack_run(master_run, values[0]);
#pragma unroll
  for (int j = 0; j < Rule::kStates; ++j) unpack_run(state_runs[j], values[1 + j]);
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    float element[kUpdated<Rule>];
#pragma unroll
    for (int j = 0; j < kUpdated<Rule>; ++j) element[j] = values[j][i];
    Rule::update(s.rule, gradient[i], element);
#pragma unroll
    for (int j = 0; j < kUpdated<Rule>; ++j) values[j][i] = element[j];
  }
  store_run<Master>(at, values[0], tensor, s.draw, 0);
#pragma unroll
  for (int j = 0; j < Rule::kStates; ++j) store_run<State>(at, values[1 + j], tensor, s.draw, 1 + j);
}

template <class Rule, class Gradient, class Master, class State>
__global__ void __launch_bounds__(kThreads) update_kernel(const __grid_constant__ UpdateArguments<Rule> args) {
  const UpdateStep<Rule> s = update_step(args);
  if (s.draw.apply == 0) return;
  for (int index = static_cast<int>(blockIdx.x); index < args.list.chunks; index += static_cast<int>(gridDim.x)) {
    const Chunk chunk = chunk_at<kChunk>(args.list, index);
    const UpdateTensor<Rule> tensor = args.list.tensor[chunk.tensor];
    for (std::int64_t at = chunk.begin + threadIdx.x * kRun; at < chunk.end; at += kThreads * kRun)
      update_run<Rule, Gradient, Master, State>(tensor, s, at);
  }
}

// ---- elements one by one: any address, any mix of dtypes ----

__device__ __forceinline__ float load_element(const void* tensor, DType dtype, std::int64_t at) {
  return dtype == DType::f32 ? static_cast<const float*>(tensor)[at] : to_float(static_cast<const bf16*>(tensor)[at]);
}

template <class Rule>
__device__ __forceinline__ void store_element(DType dtype, std::int64_t at, float value,
                                              const UpdateTensor<Rule>& tensor, const DrawStep& s, int index) {
  if (dtype == DType::f32) {
    static_cast<float*>(tensor.updated[index])[at] = value;
    return;
  }
  const RandomWords random = random_words(s.seed_low, s.seed_high, rounding(index), tensor.object, s.step,
                                          tensor.first_block + static_cast<std::uint64_t>(at) / 4);
  const std::uint32_t pair =
      at % 4 < 2 ? (at % 2 == 0 ? random.word[0] : random.word[1]) : (at % 2 == 0 ? random.word[2] : random.word[3]);
  write_bits(static_cast<bf16*>(tensor.updated[index]) + at, stochastic_bits(value, pair) >> 16);
}

template <class Rule>
__global__ void __launch_bounds__(kThreads) update_elements_kernel(const __grid_constant__ UpdateArguments<Rule> args) {
  const UpdateStep<Rule> s = update_step(args);
  if (s.draw.apply == 0) return;
  for (int index = static_cast<int>(blockIdx.x); index < args.list.chunks; index += static_cast<int>(gridDim.x)) {
    const Chunk chunk = chunk_at<kChunk>(args.list, index);
    const UpdateTensor<Rule> tensor = args.list.tensor[chunk.tensor];
    for (std::int64_t at = chunk.begin + threadIdx.x; at < chunk.end; at += kThreads) {
      float element[kUpdated<Rule>];
#pragma unroll
      for (int j = 0; j < kUpdated<Rule>; ++j) element[j] = load_element(tensor.updated[j], args.dtypes[j], at);
      Rule::update(s.rule, load_element(tensor.gradient, args.gradient_dtype, at), element);
#pragma unroll
      for (int j = 0; j < kUpdated<Rule>; ++j) store_element(args.dtypes[j], at, element[j], tensor, s.draw, j);
    }
  }
}

template <class Rule>
KernelFunction<UpdateArguments<Rule>> run_kernel(DType gradient, DType master, DType state) {
  return with_element(gradient, [&](auto g) {
    return with_element(master, [&](auto p) {
      return with_element(state, [&](auto m) -> KernelFunction<UpdateArguments<Rule>> {
        return update_kernel<Rule, decltype(g), decltype(p), decltype(m)>;
      });
    });
  });
}

/// Indices of tensor i's first input, its gradient, and of its first output.
template <class Rule>
constexpr std::size_t first_input(std::size_t i) {
  return 2 + (1 + kUpdated<Rule>)*i;
}
template <class Rule>
constexpr std::size_t first_output(std::size_t i) {
  return kUpdated<Rule> * i;
}

/// All but the pointers.
template <class Rule>
struct UpdateOp {
  UpdateArguments<Rule> constant{};
  std::vector<UpdateTensor<Rule>> tensors;
  bool alike = true;  ///< all states are of one dtype
};

template <class Rule>
UpdateOp<Rule> update_op(const OpInstance& op) {
  UpdateOp<Rule> result;
  UpdateArguments<Rule>& constant = result.constant;
  constant.constants = Rule::constants(op.attributes);
  constant.gradient_dtype = op.inputs[2].dtype;
  for (int j = 0; j < kUpdated<Rule>; ++j) {
    constant.dtypes[j] = op.inputs[static_cast<std::size_t>(3 + j)].dtype;
    result.alike = result.alike && (j == 0 || constant.dtypes[j] == constant.dtypes[1]);
  }
  const std::vector<double>&objects = op.attributes.list("objects"), &offsets = op.attributes.list("offsets");
  for (std::size_t i = 0; i < objects.size(); ++i) {
    UpdateTensor<Rule> tensor{};
    tensor.count = element_count(op.inputs[first_input<Rule>(i)].extents);
    tensor.first_block = static_cast<std::uint64_t>(offsets[i]) / 4;
    tensor.object = static_cast<std::uint32_t>(objects[i]);
    result.tensors.push_back(tensor);
  }
  return result;
}

// update (4) f32, step (16) u32, of each tensor gradient, master, states (n) -> master, states
template <class Rule>
Launch prepare_update(const OpInstance& op, CudaContext& context) {
  auto prepared = std::make_shared<const UpdateOp<Rule>>(update_op<Rule>(op));
  const UpdateArguments<Rule>& constant = prepared->constant;
  auto runs = load_kernel(run_kernel<Rule>(constant.gradient_dtype, constant.dtypes[0], constant.dtypes[1]),
                          dim3(kThreads), context.multiprocessors);
  auto elements =
      load_kernel<UpdateArguments<Rule>>(update_elements_kernel<Rule>, dim3(kThreads), context.multiprocessors);
  return [=, kind = op.kind](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    bool whole = prepared->alike;
    auto tensor_at = [&](std::size_t i) {
      UpdateTensor<Rule> tensor = prepared->tensors[i];
      tensor.gradient = in[first_input<Rule>(i)].data;
      for (int j = 0; j < kUpdated<Rule>; ++j)
        tensor.updated[j] = out[first_output<Rule>(i) + static_cast<std::size_t>(j)].data;
      return tensor;
    };
    for (std::size_t i = 0; i < prepared->tensors.size(); ++i) {
      whole = whole && aligned_16({in[first_input<Rule>(i)].data});
      for (std::size_t j = 0; j < kUpdated<Rule>; ++j) {
        const void* updated = out[first_output<Rule>(i) + j].data;
        if (updated != in[first_input<Rule>(i) + 1 + j].data)
          fail_internal(kind, "output " + std::to_string(first_output<Rule>(i) + j) + " is not its input's memory");
        whole = whole && aligned_16({updated});
      }
    }
    UpdateArguments<Rule> args = prepared->constant;
    args.update = static_cast<const UpdateState*>(in[0].data);
    args.step = static_cast<const StepState*>(in[1].data);
    const auto& kernel = whole ? runs : elements;
    for_tensor_lists<kChunk>(prepared->tensors.size(), tensor_at, [&](const TensorList<UpdateTensor<Rule>>& list) {
      args.list = list;
      kernel.launch(kernel.persistent(list.chunks), stream_of(exec), args);
    });
  };
}

template <class Rule>
OpSupport query_update(const OpInstance& op, const CudaTraits&) {
  const std::size_t tensors = op.attributes.list("objects").size();
  const std::size_t begin = first_input<Rule>(0), end = first_input<Rule>(1);
  OperandCheck check(op, first_input<Rule>(tensors), first_output<Rule>(tensors), begin);
  check.that(tensors > 0, "needs at least one object");
  operands::check_element_update(check, op, Rule::kStates);
  for (std::size_t i = end; check.ok() && i < op.inputs.size(); ++i)
    check.that(op.inputs[i].dtype == op.inputs[i - end + begin].dtype, "on cuda takes tensors of the same dtypes");
  return check.support();
}

// ---- exchange ----

struct ExchangedPair {
  float *first, *second;
  std::int64_t count;
};

struct ExchangeArguments {
  TensorList<ExchangedPair> list;
};

__global__ void __launch_bounds__(kThreads) exchange_kernel(const __grid_constant__ ExchangeArguments args) {
  for (int index = static_cast<int>(blockIdx.x); index < args.list.chunks; index += static_cast<int>(gridDim.x)) {
    const Chunk chunk = chunk_at<kChunk>(args.list, index);
    const ExchangedPair pair = args.list.tensor[chunk.tensor];
    for (std::int64_t at = chunk.begin + threadIdx.x; at < chunk.end; at += kThreads) {
      const float first = pair.first[at];
      pair.first[at] = pair.second[at];
      pair.second[at] = first;
    }
  }
}

// pairs of f32 (n): their elements change places
Launch prepare_exchange(const OpInstance&, CudaContext& context) {
  auto kernel = load_kernel<ExchangeArguments>(exchange_kernel, dim3(kThreads), context.multiprocessors);
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    for (std::size_t i = 0; i < out.size(); ++i)
      if (out[i].data != in[i].data) fail_internal("exchange", "an output is not its input's memory");
    auto pair = [&](std::size_t i) {
      return ExchangedPair{out[2 * i].as<float>(), out[2 * i + 1].as<float>(), out[2 * i].count()};
    };
    for_tensor_lists<kChunk>(out.size() / 2, pair, [&](const TensorList<ExchangedPair>& list) {
      kernel.launch(kernel.persistent(list.chunks), stream_of(exec), ExchangeArguments{list});
    });
  };
}

OpSupport query_exchange(const OpInstance& op, const CudaTraits&) {
  OperandCheck check(op, op.inputs.size(), op.inputs.size());
  operands::check_exchange(check, op);
  return check.support();
}

}  // namespace

void add_element_update_ops(OpTable& table) {
  table["adamw"] = {prepare_update<AdamwRule>, query_update<AdamwRule>};
  table["sgd"] = {prepare_update<SgdRule>, query_update<SgdRule>};
  table["lion"] = {prepare_update<LionRule>, query_update<LionRule>};
  table["schedule_free"] = {prepare_update<ScheduleFreeRule>, query_update<ScheduleFreeRule>};
  table["exchange"] = {prepare_exchange, query_exchange};
}

}  // namespace quern::cuda
