// Gradients summed over the micro-batches of a step in a tree: neighbours first, then pairs of these, and so on, as the
// bits of a counter carry. Which partial sums a micro-batch completes is read from the step's state on the device, so
// that one captured graph serves all. Bound by memory: reads and writes each element once, and a partial sum a
// micro-batch on average.

#include <bit>

#include "elementwise/elementwise_ops.h"
#include "primitives/tensor_list.cuh"
#include "quern/step_state.h"
#include "runtime/launch.cuh"
#include "runtime/operand_check.h"

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
  const std::int64_t block = op.attributes.integer("block");
  if (block < 1 || !std::has_single_bit(static_cast<std::uint64_t>(block)))
    return {"sum_tree block: found " + std::to_string(block) + ", expected a power of two", 0};
  const std::int64_t levels = std::bit_width(static_cast<std::uint64_t>(block)) - 1;
  bool fits = op.inputs.size() >= 3 && op.inputs.size() % 2 == 1 && op.outputs.size() + 1 == op.inputs.size() &&
              op.inputs[0].dtype == DType::u32 && op.inputs[0].count() == 16;
  for (std::size_t i = 1; fits && i < op.inputs.size(); i += 2) {
    const Operand &sum = op.inputs[i], &partials = op.inputs[i + 1];
    fits = (sum.dtype == DType::f32 || sum.dtype == DType::f64) && sum.dtype == op.inputs[1].dtype &&
           partials.dtype == sum.dtype && partials.extents == Extents{levels, sum.count()} &&
           op.outputs[i - 1] == sum && op.outputs[i] == partials;
  }
  return {fits ? "" : "sum_tree: takes step, and sum (n) and partials (levels, n) of each tensor, f32 or f64, in place",
          0};
}

}  // namespace

void add_sum_tree_op(OpTable& table) { table["sum_tree"] = {prepare_sum_tree, query_sum_tree}; }

}  // namespace quern::cuda
