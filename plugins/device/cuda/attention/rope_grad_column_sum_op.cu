// The rotation's gradient and its sum over tokens: the gradients of a packed qkv and of the bias that was added to it.
// A block takes 128 tokens of the heads that eight lanes hold; in place, values are only read.

#include "elementwise/column_sum_order.cuh"
#include "primitives/heads.cuh"

namespace quern::cuda {

namespace {

struct GradArguments {
  const void* dy;  ///< (N, packed)
  void* dx;        ///< like dy, or dy itself; null: not wanted
  const std::int32_t* positions;
  RopeTable table;
  float* partials;  ///< (sum_tiles(N), packed); null: not wanted
  std::int64_t rows;
  int column_tiles, rotated, row_heads, head_dim, half, lane_bits;
};

/// What a lane of a row holds: packs at `at` of a head's two halves.
struct HeadLane {
  template <class T>
  __device__ __forceinline__ static HeadLane of(int lane, const GradArguments& args) {
    return {lane >> args.lane_bits, (lane & ((1 << args.lane_bits) - 1)) * kPack<T>};
  }
  int head, at;
};

template <class T, Access kAccess>
__global__ void __launch_bounds__(kTileThreads, 3) rope_grad_column_sum_kernel(const GradArguments args) {
  constexpr int kSide = 8 * kPack<T>;  // columns of the tile in first halves; as many are in second ones
  __shared__ ColumnStrands<2 * kSide> strands;
  const TileThread thread(static_cast<int>(threadIdx.x));
  const int first_lane = static_cast<int>(blockIdx.x) % args.column_tiles * 8;
  const std::int64_t tile = static_cast<int>(blockIdx.x) / args.column_tiles;
  const std::int64_t first_row = tile * kTileSide + 4 * thread.row_group;
  const HeadLane lane = HeadLane::of<T>(first_lane + thread.lane, args);
  const bool inside = lane.head < args.row_heads, rotates = lane.head < args.rotated;
  auto offset_of = [&](int r) { return ((first_row + r) * args.row_heads + lane.head) * args.head_dim; };
  auto holds = [&](int r) { return inside && first_row + r < args.rows; };
  HeadPair<T> pairs[4];
#pragma unroll
  for (int r = 0; r < 4; ++r)
    pairs[r] = load_head<kAccess>(static_cast<const T*>(args.dy) + offset_of(r), lane.at, holds(r) ? args.half : 0,
                                  holds(r) ? args.head_dim : 0);
#pragma unroll
  for (int r = 0; r < 4; ++r)
    if (rotates && holds(r))
      pairs[r] = rotate<kAccess>(pairs[r], args.table, args.positions[first_row + r], -1.0f, lane.at, args.half);
  if (args.dx != nullptr && (rotates || args.dx != args.dy)) {
#pragma unroll
    for (int r = 0; r < 4; ++r)
      if (holds(r))
        store_head<kAccess>(static_cast<T*>(args.dx) + offset_of(r), lane.at, args.half, args.head_dim, pairs[r]);
  }
  if (args.partials == nullptr) return;
  float first[kPack<T>] = {}, second[kPack<T>] = {};
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    add_row(first, unpack(pairs[r].first).at);
    add_row(second, unpack(pairs[r].second).at);
  }
  strands.put(thread, thread.lane * kPack<T>, first);
  strands.put(thread, kSide + thread.lane * kPack<T>, second);
  __syncthreads();
  const int column = static_cast<int>(threadIdx.x);
  if (column >= 2 * kSide) return;
  const HeadLane from = HeadLane::of<T>(first_lane + column % kSide / kPack<T>, args);
  const int in_half = from.at + column % kPack<T>, begin = column < kSide ? 0 : args.half;
  if (from.head >= args.row_heads || in_half >= args.half || begin + in_half >= args.head_dim) return;
  args.partials[(tile * args.row_heads + from.head) * args.head_dim + begin + in_half] = strands.total(column);
}

// dy (N, (H + 2 K) D), positions (N) i32 -> dx like dy, sum ((H + 2 K) D)
Launch prepare(const OpInstance& op, CudaContext& context) {
  const PackedHeads packed(op.attributes);
  const DType type = op.inputs[0].dtype;
  const HeadLanes layout(packed, type);
  const RopeTable table = make_rope_table(op, context);
  const std::int64_t rows = matrix_of(op, 0).rows;
  const bool accumulate = op.outputs[1].accumulate;
  auto load = [&](auto access) {
    return with_element(type, [&](auto element) {
      KernelFunction<GradArguments> kernel = rope_grad_column_sum_kernel<decltype(element), access()>;
      return load_kernel(kernel, dim3(kTileThreads), context.multiprocessors);
    });
  };
  auto vector = load(AccessConstant<Access::vector>{}), scalar = load(AccessConstant<Access::scalar>{});
  load_column_sums();
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    const View &dy = in[0], &dx = out[0], &sum = out[1];
    const std::int64_t column_tiles = ceil_divide(packed.all() << layout.lane_bits, 8), tiles = sum_tiles(rows);
    GradArguments args{.dy = dy.data,
                       .dx = dx.data,
                       .positions = static_cast<const std::int32_t*>(in[1].data),
                       .table = table,
                       .partials = sum ? static_cast<float*>(exec.workspace) : nullptr,
                       .rows = rows,
                       .column_tiles = static_cast<int>(column_tiles),
                       .rotated = static_cast<int>(packed.rotated()),
                       .row_heads = layout.row_heads,
                       .head_dim = layout.head_dim,
                       .half = layout.half,
                       .lane_bits = layout.lane_bits};
    const auto& kernel = layout.whole && aligned_16({dy.data, dx.data}) ? vector : scalar;
    if (tiles > 0) kernel.launch(tiles * column_tiles, stream_of(exec), args);
    if (sum) sum_partial_rows(args.partials, tiles, packed.packed(), sum, accumulate, stream_of(exec));
  };
}

OpSupport query(const OpInstance& op, const CudaTraits&) {
  const auto [rows, columns] = matrix_of(op, 0);
  OperandCheck check(op, 2, 2);
  check_packed(check, op, 0, "dy");
  check_rope(check, op, 1);
  check.output(0, "dx", extents_of(op, 0)).sum(1, "sum", {columns});
  return check.support(check.ok() && op.outputs[1].present ? partial_bytes(sum_tiles(rows), columns) : 0);
}

}  // namespace

void add_rope_grad_column_sum_op(OpTable& table) { table["rope_grad_column_sum"] = {prepare, query}; }

}  // namespace quern::cuda
