// Gradients summed over the micro-batches of a step in a tree: neighbours first, then pairs of these, and so on, as the
// bits of a counter carry. Which partial sums a micro-batch completes is read from the step's state on the device, so
// that one captured graph serves all. Bound by memory: reads and writes each element once, and a partial sum a
// micro-batch on average.

#include "elementwise/elementwise_ops.h"
#include "primitives/tensor_list.cuh"
#include "quern/step_state.h"
#include "runtime/launch.cuh"
#include "runtime/operand_check.h"
#include "shared/operands/op_checks.h"

namespace quern::cuda {

namespace {

constexpr int kThreads = 256, kChunk = 16 * kThreads;

struct SummedTensor {
  void* sum;       ///< (count): of this micro-batch
  void* partials;  ///< (levels, count): of 2^level micro-batches each
  std::int64_t count;
};

struct TreeArguments {
  TensorList<SummedTensor> list;
  const StepState* step;
  std::uint32_t block, count;  ///< micro-batches: of a rank, a power of two, and of all
};

/// A block a chunk.
template <class T>
__global__ void __launch_bounds__(kThreads) sum_tree_kernel(const __grid_constant__ TreeArguments args) {
  const std::uint32_t micro_step = args.step->micro_step, at = micro_step % args.block;
  const bool last = at + 1 == args.block || micro_step + 1 == args.count;
  const Chunk chunk = chunk_at<kChunk>(args.list, static_cast<int>(blockIdx.x));
  const SummedTensor& tensor = args.list.tensor[chunk.tensor];
  T *sums = static_cast<T*>(tensor.sum), *partials = static_cast<T*>(tensor.partials);
#pragma unroll 4
  for (std::int64_t i = chunk.begin + threadIdx.x; i < chunk.end; i += kThreads) {
    T sum = sums[i];
    int level = 0;
    for (; at >> level != 0; ++level) {
      if ((at >> level & 1) != 0)
        sum = partials[level * tensor.count + i] + sum;
      else if (!last)
        break;
    }
    (last ? sums : partials + level * tensor.count)[i] = sum;
  }
}

// step (16) u32, of each tensor this micro-batch's (n) and partial sums (levels, n), f32 or f64 -> the same, in place
Launch prepare_sum_tree(const OpInstance& op, CudaContext& context) {
  const bool doubles = op.inputs[1].dtype == DType::f64;
  KernelFunction<TreeArguments> function = doubles ? sum_tree_kernel<double> : sum_tree_kernel<float>;
  auto kernel = load_kernel(function, dim3(kThreads), context.multiprocessors);
  const auto block = static_cast<std::uint32_t>(op.attributes.integer("block"));
  const auto count = static_cast<std::uint32_t>(op.attributes.integer("count"));
  return [=](std::span<const View> in, std::span<const View>, const Exec& exec) {
    TreeArguments args{{}, static_cast<const StepState*>(in[0].data), block, count};
    auto tensor_at = [&](std::size_t i) {
      return SummedTensor{in[1 + 2 * i].data, in[2 + 2 * i].data, in[1 + 2 * i].count()};
    };
    for_tensor_lists<kChunk>((in.size() - 1) / 2, tensor_at, [&](const TensorList<SummedTensor>& list) {
      args.list = list;
      kernel.launch(list.chunks, stream_of(exec), args);
    });
  };
}

OpSupport query_sum_tree(const OpInstance& op, const CudaTraits&) {
  operands::OperandCheck check = operands::check_sum_tree(op);
  check.that(op.inputs.size() > 2, "without tensors");
  for (std::size_t i = 3; i < op.inputs.size(); i += 2)
    check.that(op.inputs[i].dtype == op.inputs[1].dtype, "on cuda takes tensors of one dtype");
  return check.support();
}

}  // namespace

void add_sum_tree_op(OpTable& table) { table["sum_tree"] = {prepare_sum_tree, query_sum_tree}; }

}  // namespace quern::cuda
