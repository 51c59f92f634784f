// Rotary position embedding of a packed qkv: query and key heads are rotated half-split as in Hugging Face, values pass
// through; rotated in place, they are not touched. The gradient is the inverse rotation.

#include "attention/rope_ops.h"

#include "primitives/heads.cuh"

namespace quern::cuda {

namespace {

struct RopeArguments {
  const void* x;  ///< (N, packed)
  void* y;        ///< like x, or x itself
  const std::int32_t* positions;
  RopeTable table;
  std::uint32_t units;    ///< tokens * unit_heads
  FastDivide unit_heads;  ///< heads of a token that are visited: all, or the rotated ones
  int rotated, row_heads, head_dim, half, lane_bits;
  float sign;
};

template <class T, Access kAccess>
__global__ void __launch_bounds__(kHeadThreads) rope_kernel(const RopeArguments args) {
  const std::uint32_t thread = blockIdx.x * kHeadThreads + threadIdx.x, unit = thread >> args.lane_bits;
  if (unit >= args.units) return;
  std::uint32_t head;
  const std::uint32_t token = args.unit_heads.divide(unit, head);
  const int at = static_cast<int>(thread & ((1u << args.lane_bits) - 1)) * kPack<T>;
  const std::int64_t offset = (std::int64_t{token} * args.row_heads + head) * args.head_dim;
  HeadPair<T> pair = load_head<kAccess>(static_cast<const T*>(args.x) + offset, at, args.half, args.head_dim);
  if (static_cast<int>(head) < args.rotated)
    pair = rotate<kAccess>(pair, args.table, args.positions[token], args.sign, at, args.half);
  store_head<kAccess>(static_cast<T*>(args.y) + offset, at, args.half, args.head_dim, pair);
}

// qkv (N, (H + 2 K) D), positions (N) i32 -> y like qkv
Launch prepare_rope(const OpInstance& op, CudaContext& context, float sign) {
  const PackedHeads packed(op.attributes);
  const DType type = op.inputs[0].dtype;
  const HeadLanes layout(packed, type);
  const RopeTable table = make_rope_table(op, context);
  const std::int64_t tokens = matrix_of(op, 0).rows;
  auto load = [&](auto access) {
    return with_element(type, [&](auto element) {
      KernelFunction<RopeArguments> kernel = rope_kernel<decltype(element), access()>;
      return load_kernel(kernel, dim3(kHeadThreads), context.multiprocessors);
    });
  };
  auto vector = load(AccessConstant<Access::vector>{}), scalar = load(AccessConstant<Access::scalar>{});
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    const View &x = in[0], &y = out[0];
    if (tokens == 0 || !y) return;
    const std::int64_t unit_heads = x.data == y.data ? packed.rotated() : packed.all();
    const std::int64_t units = tokens * unit_heads;
    RopeArguments args{.x = x.data,
                       .y = y.data,
                       .positions = static_cast<const std::int32_t*>(in[1].data),
                       .table = table,
                       .units = static_cast<std::uint32_t>(units),
                       .unit_heads = FastDivide(static_cast<std::uint32_t>(unit_heads)),
                       .rotated = static_cast<int>(packed.rotated()),
                       .row_heads = layout.row_heads,
                       .head_dim = layout.head_dim,
                       .half = layout.half,
                       .lane_bits = layout.lane_bits,
                       .sign = sign};
    const auto& kernel = layout.whole && aligned_16({x.data, y.data}) ? vector : scalar;
    kernel.launch(layout.blocks(units), stream_of(exec), args);
  };
}

OpSupport query_rope(const OpInstance& op, const CudaTraits&) {
  OperandCheck check(op, 2, 1);
  check_packed(check, op, 0, "qkv");
  check_rope(check, op, 1);
  return check.output(0, "y", extents_of(op, 0)).support();
}

}  // namespace

void add_rope_ops(OpTable& table) {
  table["rope"] = {[](const OpInstance& op, CudaContext& context) { return prepare_rope(op, context, 1.0f); },
                   query_rope};
  table["rope_grad"] = {[](const OpInstance& op, CudaContext& context) { return prepare_rope(op, context, -1.0f); },
                        query_rope};
  add_rope_grad_column_sum_op(table);
}

}  // namespace quern::cuda
