// What Muon is made of beside matmuls: the momentum's direction, of a part's rows; stacks of such matrices, each
// divided by its norm; factors of their rows; and the step along the orthogonal matrix.

#include <algorithm>
#include <string>

#include "optimizer/optimizer_ops.h"
#include "optimizer/update_rules.cuh"
#include "primitives/philox.cuh"
#include "primitives/vector.cuh"
#include "runtime/launch.cuh"
#include "runtime/operand_check.h"
#include "shared/operands/op_checks.h"

namespace quern::cuda {

namespace {

constexpr int kThreads = 256;
constexpr double kLeastNorm = 1e-7, kLeastRoot = 1e-10;

// ---- direction and step: elements of a part's rows ----

struct PartArguments {
  const UpdateState* update;
  const StepState* step;
  const void* read;      ///< gradient of the whole, or direction of the part
  void* updated;         ///< momentum or master of the whole
  void* direction;       ///< of the part, where it is written
  const float* factors;  ///< of the part's rows, where they have any
  std::int64_t columns;
  std::int64_t first;  ///< element of the whole where the part begins
  std::int64_t count;
  std::int64_t offset;
  std::uint32_t object;
  float momentum;
  bool nesterov;
  double rate, weight_decay, factor;
};

template <class T>
__device__ __forceinline__ void store_updated(T* tensor, std::int64_t at, float value, const PartArguments& args,
                                              int index) {
  if constexpr (sizeof(T) == 4) {
    tensor[at] = value;
  } else {
    const auto element = static_cast<std::uint64_t>(args.offset + at);
    const RandomWords random = random_words(args.step->seed_low, args.step->seed_high, rounding(index), args.object,
                                            args.step->step, element / 4);
    std::uint32_t word = random.word[0];
#pragma unroll
    for (std::uint64_t i = 1; i < 4; ++i)
      if (element % 4 == i) word = random.word[i];
    write_bits(tensor + at, stochastic_bits(value, word) >> 16);
  }
}

template <class Gradient, class Momentum, class Direction>
__global__ void __launch_bounds__(kThreads) direction_kernel(const PartArguments args) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= args.count) return;
  auto* direction = static_cast<Direction*>(args.direction);
  if (args.update->apply == 0) {
    direction[i] = from_float<Direction>(0.0f);
    return;
  }
  const std::int64_t at = args.first + i;
  const float of_gradient = (1.0f - args.momentum) * args.update->gradient_scale;
  const float gradient = of_gradient * to_float(static_cast<const Gradient*>(args.read)[at]);
  auto* momentum = static_cast<Momentum*>(args.updated);
  const float fresh = args.momentum * to_float(momentum[at]) + gradient;
  store_updated(momentum, at, fresh, args, 1);
  direction[i] = from_float<Direction>(args.nesterov ? args.momentum * fresh + gradient : fresh);
}

template <class Master, class Direction>
__global__ void __launch_bounds__(kThreads) apply_kernel(const PartArguments args) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= args.count || args.update->apply == 0) return;
  const std::int64_t at = args.first + i;
  const double rate = args.step->learning_rate * args.rate;
  const auto keep = static_cast<float>(1 - rate * args.weight_decay), along = static_cast<float>(-rate * args.factor);
  auto* master = static_cast<Master*>(args.updated);
  float direction = to_float(static_cast<const Direction*>(args.read)[i]);
  if (args.factors) direction *= args.factors[i / args.columns];
  store_updated(master, at, keep * to_float(master[at]) + along * direction, args, 0);
}

PartArguments part_of(const OpInstance& op, const Operand& whole) {
  PartArguments args{};
  args.first = op.attributes.integer("first") * whole.extents[1];
  args.count = op.attributes.integer("rows") * whole.extents[1];
  args.columns = whole.extents[1];
  args.offset = static_cast<std::int64_t>(op.attributes.list("offsets")[0]);
  args.object = static_cast<std::uint32_t>(op.attributes.list("objects")[0]);
  return args;
}

void launch_part(const LoadedKernel<PartArguments>& kernel, PartArguments args, std::span<const View> in,
                 const Exec& exec) {
  args.update = static_cast<const UpdateState*>(in[0].data);
  args.step = static_cast<const StepState*>(in[1].data);
  kernel.launch(ceil_divide(args.count, std::int64_t{kThreads}), stream_of(exec), args);
}

void need_in_place(const char* kind, const View& input, const View& output) {
  if (output.data != input.data) fail_internal(kind, "an output is not its input's memory");
}

// update, step, gradient (n, c), momentum (n, c) -> momentum, direction (rows, c): m = momentum m + (1 - momentum) g,
// and m, or momentum m + (1 - momentum) g again
Launch prepare_direction(const OpInstance& op, CudaContext& context) {
  PartArguments constant = part_of(op, op.inputs[3]);
  constant.momentum = static_cast<float>(op.attributes.real("momentum"));
  constant.nesterov = op.attributes.integer("nesterov") != 0;
  auto kernel = with_element(op.inputs[2].dtype, [&](auto g) {
    return with_element(op.inputs[3].dtype, [&](auto m) {
      return with_element(op.outputs[1].dtype, [&](auto d) {
        KernelFunction<PartArguments> function = direction_kernel<decltype(g), decltype(m), decltype(d)>;
        return load_kernel(function, dim3(kThreads), context.multiprocessors);
      });
    });
  });
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    need_in_place("muon_direction", in[3], out[0]);
    PartArguments args = constant;
    args.read = in[2].data;
    args.updated = out[0].data;
    args.direction = out[1].data;
    launch_part(kernel, args, in, exec);
  };
}

// update, step, master (n, c), stack (any, rows, c), factors? (rows) -> master: shrunk by rate * weight_decay, less
// rate * factor * the stack's matrix, of which rows are multiplied by factors first
Launch prepare_apply(const OpInstance& op, CudaContext& context) {
  PartArguments constant = part_of(op, op.inputs[2]);
  constant.rate = op.attributes.real_or("rate", 1.0);
  constant.weight_decay = op.attributes.real("weight_decay");
  constant.factor = op.attributes.real("factor");
  auto kernel = with_element(op.inputs[2].dtype, [&](auto p) {
    return with_element(op.inputs[3].dtype, [&](auto d) {
      KernelFunction<PartArguments> function = apply_kernel<decltype(p), decltype(d)>;
      return load_kernel(function, dim3(kThreads), context.multiprocessors);
    });
  });
  const auto first =
      static_cast<std::size_t>(op.attributes.integer("index") * constant.count) * size_of(op.inputs[3].dtype);
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    need_in_place("muon_apply", in[2], out[0]);
    PartArguments args = constant;
    args.read = static_cast<const char*>(in[3].data) + first;
    args.factors = in.size() > 4 ? static_cast<const float*>(in[4].data) : nullptr;
    args.updated = out[0].data;
    launch_part(kernel, args, in, exec);
  };
}

// ---- a stack of matrices, each over its norm ----

struct NormArguments {
  const void* x;
  const double* square;
  void* y;  ///< the stack's matrix
  std::int64_t count;
};

template <class T, Access kAccess>
__global__ void __launch_bounds__(kThreads) over_norm_kernel(const NormArguments args) {
  const std::int64_t at = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * kPack<T>;
  if (at >= args.count) return;
  const double norm = sqrt(*args.square);
  const auto factor = static_cast<float>(1.0 / (norm > kLeastNorm ? norm : kLeastNorm));
  Floats<T> values = unpack(load_pack<kAccess>(static_cast<const T*>(args.x), at, args.count));
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) values.at[i] *= factor;
  store_pack<kAccess>(static_cast<T*>(args.y), at, args.count, round_pack(values));
}

Launch prepare_over_norm(const OpInstance& op, CudaContext& context) {
  NormArguments constant{};
  constant.count = op.inputs[1].count();
  const std::int64_t pack = op.inputs[1].dtype == DType::f32 ? kPack<float> : kPack<bf16>;
  const std::size_t bytes = op.inputs[1].bytes();
  auto load = [&](auto access) {
    return with_element(op.inputs[1].dtype, [&](auto element) {
      KernelFunction<NormArguments> kernel = over_norm_kernel<decltype(element), access()>;
      return load_kernel(kernel, dim3(kThreads), context.multiprocessors);
    });
  };
  auto vector = load(AccessConstant<Access::tail>{}), scalar = load(AccessConstant<Access::scalar>{});
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    NormArguments args = constant;
    for (std::size_t i = 1; i < in.size(); ++i) {
      args.x = in[i].data;
      args.square = static_cast<const double*>(in[0].data) + (i - 1);
      args.y = static_cast<char*>(out[0].data) + (i - 1) * bytes;
      const auto& kernel = aligned_16({args.x, args.y}) ? vector : scalar;
      kernel.launch(ceil_divide(args.count, kThreads * pack), stream_of(exec), args);
    }
  };
}

// ---- factors of rows, from their squares and these squares' averages ----

struct FactorArguments {
  const UpdateState* update;
  const void* x;  ///< the stack's matrix
  float* moment;  ///< of its rows
  float* factors;
  double* squares;  ///< of rows
  std::int64_t rows, columns;
  double beta;
};

/// The block's sum, for its first thread.
__device__ __forceinline__ double sum_of_block(double value) {
  __shared__ double parts[kThreads / 32];
  for (int step = 16; step > 0; step /= 2) value += __shfl_down_sync(~0u, value, step);
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x == 0)
    for (int warp = 1; warp < kThreads / 32; ++warp) value += parts[warp];
  return value;
}

/// A block for a row.
template <class T>
__global__ void __launch_bounds__(kThreads) row_squares_kernel(const FactorArguments args) {
  const std::int64_t row = blockIdx.x;
  if (args.update->apply == 0) {
    if (threadIdx.x == 0) args.squares[row] = 0, args.factors[row] = 0;
    return;
  }
  const T* x = static_cast<const T*>(args.x) + row * args.columns;
  double square = 0;
  for (std::int64_t i = threadIdx.x; i < args.columns; i += kThreads) {
    const double value = to_float(x[i]);
    square += value * value;
  }
  square = sum_of_block(square);
  if (threadIdx.x != 0) return;
  const auto moment =
      static_cast<float>(args.beta * args.moment[row] + (1 - args.beta) * square / static_cast<double>(args.columns));
  args.squares[row] = square;
  args.moment[row] = moment;
  args.factors[row] = static_cast<float>(1 / (sqrt(static_cast<double>(moment)) + kLeastRoot));
}

/// One block.
__global__ void __launch_bounds__(kThreads) keep_length_kernel(const FactorArguments args) {
  __shared__ float length;
  double before = 0, after = 0;
  for (std::int64_t row = threadIdx.x; row < args.rows; row += kThreads) {
    const double square = args.squares[row], factor = args.factors[row];
    before += square, after += square * factor * factor;
  }
  before = sum_of_block(before);
  after = sum_of_block(after);
  if (threadIdx.x == 0) length = static_cast<float>(after > 0 ? sqrt(before / after) : 0);
  __syncthreads();
  for (std::int64_t row = threadIdx.x; row < args.rows; row += kThreads) args.factors[row] *= length;
}

Launch prepare_row_factors(const OpInstance& op, CudaContext& context) {
  FactorArguments constant{};
  const Extents& stack = op.inputs[3].extents;
  constant.rows = stack[1], constant.columns = stack[2], constant.beta = op.attributes.real("beta");
  const std::int64_t row = op.attributes.integer("first");
  const auto first =
      static_cast<std::size_t>(op.attributes.integer("index") * stack[1] * stack[2]) * size_of(op.inputs[3].dtype);
  auto squares = with_element(op.inputs[3].dtype, [&](auto element) {
    KernelFunction<FactorArguments> function = row_squares_kernel<decltype(element)>;
    return load_kernel(function, dim3(kThreads), context.multiprocessors);
  });
  KernelFunction<FactorArguments> function = keep_length_kernel;
  auto keep = load_kernel(function, dim3(kThreads), context.multiprocessors);
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    need_in_place("row_factors", in[2], out[0]);
    FactorArguments args = constant;
    args.update = static_cast<const UpdateState*>(in[0].data);
    args.x = static_cast<const char*>(in[3].data) + first;
    args.moment = static_cast<float*>(out[0].data) + row;
    args.factors = static_cast<float*>(out[1].data);
    args.squares = static_cast<double*>(exec.workspace);
    squares.launch(args.rows, stream_of(exec), args);
    keep.launch(1, stream_of(exec), args);
  };
}

OpSupport query_row_factors(const OpInstance& op, const CudaTraits&) {
  OperandCheck check(op, 4, 2, 3);
  operands::check_row_factors(check, op);
  return check.support(check.ok() ? static_cast<std::size_t>(op.inputs[3].extents[1]) * sizeof(double) : 0);
}

template <void (*kCheck)(operands::OperandCheck&, const OpInstance&)>
OpSupport query(const OpInstance& op, std::size_t inputs, std::size_t outputs) {
  OperandCheck check(op, inputs, outputs);
  kCheck(check, op);
  return check.support();
}

OpSupport query_over_norm(const OpInstance& op, const CudaTraits&) {
  OperandCheck check(op, std::max<std::size_t>(op.inputs.size(), 2), 1, 1);
  operands::check_over_norm(check, op);
  for (std::size_t i = 1; check.ok() && i < op.inputs.size(); ++i)
    check.that(op.inputs[i].dtype == op.outputs[0].dtype, "on cuda takes and makes one dtype");
  return check.support();
}

}  // namespace

void add_muon_ops(OpTable& table) {
  table["muon_direction"] = {prepare_direction, [](const OpInstance& op, const CudaTraits&) {
                               return query<operands::check_muon_direction>(op, 4, 2);
                             }};
  table["muon_apply"] = {prepare_apply, [](const OpInstance& op, const CudaTraits&) {
                           return query<operands::check_muon_apply>(op, op.inputs.size() > 4 ? 5 : 4, 1);
                         }};
  table["row_factors"] = {prepare_row_factors, query_row_factors};
  table["over_norm"] = {prepare_over_norm, query_over_norm};
}

}  // namespace quern::cuda
