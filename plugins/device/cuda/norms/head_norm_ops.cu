// RMS norm of each query and key head of a packed qkv (QK-norm), or of all queries and all keys together, and its
// gradient, alone and fused with the rotation beside it.

#include "elementwise/column_sums.h"
#include "norms/head_norm.cuh"
#include "norms/norm_ops.h"
#include "shared/operands/op_checks.h"

namespace quern::cuda {

namespace {

using operands::NormedHeads;

// qkv (N, (H + 2 K) D), query_weight (D), key_weight (D) -> y like qkv, rstd (N, H + K) f32;
// all heads together: (H D), (K D), (N, 2); kRope: also positions (N) i32 -> z = rope(y)
template <bool kRope>
Launch prepare_head_norm(const OpInstance& op, CudaContext& context) {
  const NormedHeads normed(op.attributes);
  const PackedHeads& packed = normed.packed;
  const DType type = op.inputs[0].dtype;
  const HeadLanes layout(packed, type);
  const auto eps = static_cast<float>(op.attributes.real("eps"));
  const std::int64_t tokens = matrix_of(op, 0).rows, units = tokens * packed.all();
  RopeTable table;
  if constexpr (kRope) table = make_rope_table(op, context);
  auto load = [&](auto access) {
    return with_element(type, [&](auto element) {
      using T = decltype(element);
      KernelFunction<HeadNormArguments> kernel = head_norm_kernel<T, access(), kRope>;
      if (normed.width) kernel = width_norm_kernel<T, access(), kRope>;
      return load_kernel(kernel, dim3(kHeadThreads), context.multiprocessors);
    });
  };
  auto vector = load(AccessConstant<Access::vector>{}), scalar = load(AccessConstant<Access::scalar>{});
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    if (units == 0) return;
    HeadNormArguments args{.x = in[0].data,
                           .query_weight = in[1].data,
                           .key_weight = in[2].data,
                           .y = out[0].data,
                           .z = kRope ? out[2].data : nullptr,
                           .rstd = static_cast<float*>(out[1].data),
                           .positions = kRope ? static_cast<const std::int32_t*>(in[3].data) : nullptr,
                           .table = table,
                           .units = static_cast<std::uint32_t>(units),
                           .row = FastDivide(static_cast<std::uint32_t>(layout.row_heads)),
                           .heads = static_cast<int>(packed.heads),
                           .normed = static_cast<int>(packed.rotated()),
                           .row_heads = layout.row_heads,
                           .head_dim = layout.head_dim,
                           .half = layout.half,
                           .lane_bits = layout.lane_bits,
                           .eps = eps};
    bool whole = layout.whole && aligned_16({args.x, args.query_weight, args.key_weight, args.y, args.z});
    (whole ? vector : scalar).launch(normed.width ? tokens : layout.blocks(units), stream_of(exec), args);
  };
}

// dy, qkv (N, (H + 2 K) D), query_weight, key_weight (D), rstd (N, H + K) f32 -> dqkv, dquery_weight (D), dkey_weight
// (D); kRope: dy, positions (N) i32, qkv, ... -> rope_grad(dy), dqkv, ...
template <bool kRope>
Launch prepare_head_norm_grad(const OpInstance& op, CudaContext& context) {
  const NormedHeads normed(op.attributes);
  const PackedHeads& packed = normed.packed;
  constexpr std::size_t kX = kRope ? 2 : 1, kDx = kRope ? 1 : 0;
  const DType type = op.inputs[kX].dtype;
  const HeadLanes layout(packed, type);
  const std::int64_t tokens = matrix_of(op, kX).rows, units = tokens * packed.all();
  const bool accumulate_query = op.outputs[kDx + 1].accumulate, accumulate_key = op.outputs[kDx + 2].accumulate;
  RopeTable table;
  if constexpr (kRope) table = make_rope_table(op, context);
  auto load = [&](auto access) {
    return with_element(type, [&](auto element) {
      using T = decltype(element);
      KernelFunction<HeadGradArguments> kernel = head_norm_grad_kernel<T, access(), kRope>;
      if (normed.width) kernel = width_norm_grad_kernel<T, access(), kRope>;
      return load_kernel(kernel, dim3(kHeadThreads), context.multiprocessors);
    });
  };
  auto vector = load(AccessConstant<Access::vector>{}), scalar = load(AccessConstant<Access::scalar>{});
  load_column_sums();
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    const View &dquery = out[kDx + 1], &dkey = out[kDx + 2];
    HeadGradArguments args{.dy = in[0].data,
                           .x = in[kX].data,
                           .query_weight = in[kX + 1].data,
                           .key_weight = in[kX + 2].data,
                           .rstd = static_cast<const float*>(in[kX + 3].data),
                           .positions = kRope ? static_cast<const std::int32_t*>(in[1].data) : nullptr,
                           .table = table,
                           .d = kRope ? out[0].data : nullptr,
                           .dx = out[kDx].data,
                           .partials = dquery || dkey ? static_cast<float*>(exec.workspace) : nullptr,
                           .units = static_cast<std::uint32_t>(units),
                           .rounds = 0,
                           .row = FastDivide(static_cast<std::uint32_t>(layout.row_heads)),
                           .heads = static_cast<int>(packed.heads),
                           .normed = static_cast<int>(packed.rotated()),
                           .row_heads = layout.row_heads,
                           .head_dim = layout.head_dim,
                           .half = layout.half,
                           .lane_bits = layout.lane_bits};
    bool whole = layout.whole && aligned_16({args.dy, args.x, args.query_weight, args.key_weight, args.d, args.dx});
    const auto& kernel = whole ? vector : scalar;
    const std::int64_t work = normed.width ? tokens : layout.blocks(units);
    const std::int64_t blocks = std::min(kMostPartials, kernel.persistent(work));
    args.rounds = static_cast<std::uint32_t>(ceil_divide(work, blocks));
    kernel.launch(blocks, stream_of(exec), args);
    if (args.partials)
      sum_partial_rows({args.partials, dquery, accumulate_query},
                       {args.partials + normed.query_size(), dkey, accumulate_key}, std::min(blocks, work),
                       normed.query_size() + normed.key_size(), stream_of(exec));
  };
}

/// Lanes of a warp share a head; all heads together have a block.
void check_sizes(OperandCheck& check, const OpInstance& op, std::size_t x) {
  if (!check.ok()) return;
  if (!NormedHeads(op.attributes).width) return check_packed(check, op, x, "qkv");
  check.that(matrix_of(op, x).rows * PackedHeads(op.attributes).all() < std::int64_t{1} << 31,
             "on cuda takes up to 2^31 heads of all tokens");
}

OpSupport query_head_norm(const OpInstance& op, bool rotated) {
  OperandCheck check(op, rotated ? 4 : 3, rotated ? 3 : 2);
  operands::check_head_norm(check, op, rotated);
  check_sizes(check, op, 0);
  return check.support();
}

OpSupport query_head_norm_grad(const OpInstance& op, bool rotated) {
  const NormedHeads normed(op.attributes);
  const std::size_t x = rotated ? 2 : 1, dx = rotated ? 1 : 0;
  OperandCheck check(op, x + 4, dx + 3, dx + 1);
  operands::check_head_norm_grad(check, op, rotated);
  check_sizes(check, op, x);
  if (!check.ok() || !(op.outputs[dx + 1].present || op.outputs[dx + 2].present)) return check.support();
  const std::int64_t tokens = matrix_of(op, x).rows;
  const std::int64_t work =
      normed.width ? tokens : HeadLanes(normed.packed, op.inputs[x].dtype).blocks(tokens * normed.packed.all());
  return check.support(
      partial_bytes(std::max<std::int64_t>(1, std::min(work, kMostPartials)), normed.query_size() + normed.key_size()));
}

}  // namespace

void add_head_norm_ops(OpTable& table) {
  table["head_norm"] = {prepare_head_norm<false>,
                        [](const OpInstance& op, const CudaTraits&) { return query_head_norm(op, false); }};
  table["head_norm_rope"] = {prepare_head_norm<true>,
                             [](const OpInstance& op, const CudaTraits&) { return query_head_norm(op, true); }};
  table["head_norm_grad"] = {prepare_head_norm_grad<false>,
                             [](const OpInstance& op, const CudaTraits&) { return query_head_norm_grad(op, false); }};
  table["rope_grad_head_norm_grad"] = {prepare_head_norm_grad<true>, [](const OpInstance& op, const CudaTraits&) {
                                         return query_head_norm_grad(op, true);
                                       }};
}

}  // namespace quern::cuda
