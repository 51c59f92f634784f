// dropout and its gradient: the mask is drawn from the bits of x, as dropout_keeps of quern/random.h says.

#include "elementwise/elementwise_ops.h"
#include "primitives/philox.cuh"
#include "primitives/vector.cuh"
#include "quern/step_state.h"
#include "runtime/launch.cuh"
#include "runtime/operand_check.h"

namespace quern::cuda {

namespace {

constexpr int kThreads = 256;

struct DropoutArguments {
  const void *dy, *x;  ///< (count); dy is x where there is no gradient
  const StepState* state;
  void* y;
  std::int64_t count;
  float probability;
  std::uint32_t object;
};

template <class T, Access kAccess>
__global__ void __launch_bounds__(kThreads) dropout_kernel(const DropoutArguments args) {
  const std::int64_t first = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * kPack<T>;
  if (first >= args.count) return;
  const StepState& state = *args.state;
  const std::uint32_t salt =
      random_words(state.seed_low, state.seed_high, RandomPurpose::dropout, args.object, state.step, state.micro_step)
          .word[0];
  const Floats<T> x = unpack(load_pack<kAccess>(static_cast<const T*>(args.x), first, args.count));
  Floats<T> y = unpack(load_pack<kAccess>(static_cast<const T*>(args.dy), first, args.count));
  const float factor = 1.0f / (1.0f - args.probability);
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) {
    const bool keep =
        dropout_keeps(__float_as_uint(x.at[i]), salt, static_cast<std::uint32_t>(first + i), args.probability);
    y.at[i] = keep ? y.at[i] * factor : 0.0f;
  }
  store_pack<kAccess>(static_cast<T*>(args.y), first, args.count, round_pack(y));
}

Launch prepare_dropout(const OpInstance& op, CudaContext& context) {
  const std::int64_t count = element_count(op.inputs[0].extents);
  const auto per_block = static_cast<std::int64_t>(16 / size_of(op.inputs[0].dtype)) * kThreads;
  auto load = [&](auto access) {
    return with_element(op.inputs[0].dtype, [&](auto element) {
      KernelFunction<DropoutArguments> kernel = dropout_kernel<decltype(element), access()>;
      return load_kernel(kernel, dim3(kThreads), context.multiprocessors);
    });
  };
  auto vector = load(AccessConstant<Access::tail>{}), scalar = load(AccessConstant<Access::scalar>{});
  const auto probability = static_cast<float>(op.attributes.real("probability"));
  const auto object = static_cast<std::uint32_t>(op.attributes.integer("object"));
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    if (count == 0) return;
    DropoutArguments args{.dy = in[0].data,
                          .x = in[in.size() - 2].data,
                          .state = in.back().as<StepState>(),
                          .y = out[0].data,
                          .count = count,
                          .probability = probability,
                          .object = object};
    const auto& kernel = aligned_16({args.dy, args.x, args.y}) ? vector : scalar;
    kernel.launch(ceil_divide(count, per_block), stream_of(exec), args);
  };
}

OpSupport query_dropout(const OpInstance& op, const CudaTraits&) {
  const std::size_t inputs = op.kind == "dropout" ? 2 : 3;
  OperandCheck check(op, inputs, 1);
  for (std::size_t i = 0; i + 1 < inputs; ++i) check.input(i, i + 2 == inputs ? "x" : "dy", extents_of(op, 0));
  check.input(inputs - 1, "step", {std::int64_t{sizeof(StepState) / 4}}, DType::u32);
  return check.output(0, inputs == 2 ? "y" : "dx", extents_of(op, 0)).support();
}

}  // namespace

void add_dropout_ops(OpTable& table) { table["dropout"] = table["dropout_grad"] = {prepare_dropout, query_dropout}; }

}  // namespace quern::cuda
