// What Muon is made of beside matmuls: the momentum's direction, of a part's rows; its division by its norm; weighted
// sums of matrices; and the step along the orthogonal matrix.

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
constexpr double kLeastNorm = 1e-7;

// ---- direction and step: elements of a part's rows ----

struct PartArguments {
  const UpdateState* update;
  const StepState* step;
  const void* read;    ///< gradient of the whole, or direction of the part
  void* updated;       ///< momentum or master of the whole
  void* direction;     ///< of the part, where it is written
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
  const float direction = to_float(static_cast<const Direction*>(args.read)[i]);
  store_updated(master, at, keep * to_float(master[at]) + along * direction, args, 0);
}

PartArguments part_of(const OpInstance& op, const Operand& whole) {
  PartArguments args{};
  args.first = op.attributes.integer("first") * whole.extents[1];
  args.count = op.attributes.integer("rows") * whole.extents[1];
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

// update, step, master (n, c), direction (rows, c) -> master: shrunk by rate * weight_decay, less rate * factor *
// direction
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
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    need_in_place("muon_apply", in[2], out[0]);
    PartArguments args = constant;
    args.read = in[3].data;
    args.updated = out[0].data;
    launch_part(kernel, args, in, exec);
  };
}

// ---- y = alpha a + beta b, alpha given or 1 over a norm ----

struct SumArguments {
  const void *a, *b;     ///< b null: none
  const double* square;  ///< null: alpha is given
  void* y;
  std::int64_t count;
  float alpha, beta;
};

template <class T, Access kAccess>
__global__ void __launch_bounds__(kThreads) weighted_sum_kernel(const SumArguments args) {
  const std::int64_t at = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * kPack<T>;
  if (at >= args.count) return;
  const double norm = args.square ? sqrt(*args.square) : 1.0;
  const float alpha = args.square ? static_cast<float>(1.0 / (norm > kLeastNorm ? norm : kLeastNorm)) : args.alpha;
  Floats<T> values = unpack(load_pack<kAccess>(static_cast<const T*>(args.a), at, args.count));
  Floats<T> added{};
  if (args.b) added = unpack(load_pack<kAccess>(static_cast<const T*>(args.b), at, args.count));
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) values.at[i] = fmaf(alpha, values.at[i], args.beta * added.at[i]);
  store_pack<kAccess>(static_cast<T*>(args.y), at, args.count, round_pack(values));
}

Launch prepare_sum(const OpInstance& op, CudaContext& context) {
  const bool weighted = op.kind == "weighted_sum";
  SumArguments constant{};
  constant.count = op.inputs[0].count();
  if (weighted) {
    constant.alpha = static_cast<float>(op.attributes.real("alpha"));
    constant.beta = static_cast<float>(op.attributes.real("beta"));
  }
  const std::int64_t pack = op.inputs[0].dtype == DType::f32 ? kPack<float> : kPack<bf16>;
  auto load = [&](auto access) {
    return with_element(op.inputs[0].dtype, [&](auto element) {
      KernelFunction<SumArguments> kernel = weighted_sum_kernel<decltype(element), access()>;
      return load_kernel(kernel, dim3(kThreads), context.multiprocessors);
    });
  };
  auto vector = load(AccessConstant<Access::tail>{}), scalar = load(AccessConstant<Access::scalar>{});
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    SumArguments args = constant;
    args.a = in[0].data;
    args.b = weighted ? in[1].data : nullptr;
    args.square = weighted ? nullptr : static_cast<const double*>(in[1].data);
    args.y = out[0].data;
    const auto& kernel = aligned_16({args.a, args.b, args.y}) ? vector : scalar;
    kernel.launch(ceil_divide(args.count, kThreads * pack), stream_of(exec), args);
  };
}

template <void (*kCheck)(operands::OperandCheck&, const OpInstance&), std::size_t kInputs, std::size_t kOutputs>
OpSupport query(const OpInstance& op, const CudaTraits&) {
  OperandCheck check(op, kInputs, kOutputs);
  kCheck(check, op);
  if (kInputs == 2)
    for (std::size_t i = 0; check.ok() && i < op.inputs.size(); ++i)
      check.that(op.inputs[i].dtype == DType::f64 || op.inputs[i].dtype == op.outputs[0].dtype,
                 "on cuda takes and makes one dtype");
  return check.support();
}

}  // namespace

void add_muon_ops(OpTable& table) {
  table["muon_direction"] = {prepare_direction, query<operands::check_muon_direction, 4, 2>};
  table["muon_apply"] = {prepare_apply, query<operands::check_muon_apply, 4, 1>};
  table["over_norm"] = {prepare_sum, query<operands::check_over_norm, 2, 1>};
  table["weighted_sum"] = {prepare_sum, query<operands::check_weighted_sum, 2, 1>};
}

}  // namespace quern::cuda
