// RMS norm of each query and key head of a packed qkv (QK-norm), its gradient, and the norm fused with the rotation
// that follows it. Values pass through.

#include <algorithm>

#include "attention/rope_table.h"
#include "norms/norm_ops.h"
#include "primitives/blocks.h"
#include "primitives/row_math.h"
#include "runtime/operand_check.h"
#include "shared/operands/op_checks.h"

namespace quern::cpu {

namespace {

enum Slot : int { kQueryWeight, kKeyWeight, kX, kOther, kY, kZ, kRstd };

struct HeadWeights {
  const float *query, *key;
};

HeadWeights load_weights(const View& query, const View& key, std::int64_t head_dim) {
  return {load(query, 0, head_dim, scratch(kQueryWeight, head_dim)),
          load(key, 0, head_dim, scratch(kKeyWeight, head_dim))};
}

/// One packed row; rstd (H + K).
void norm_row(const float* x, const PackedHeads& packed, const HeadWeights& weights, float eps, float* y, float* rstd) {
  std::int64_t keys = packed.heads * packed.head_dim, values = packed.values_begin();
  head_norm(x, weights.query, packed.heads, packed.head_dim, eps, y, rstd);
  head_norm(x + keys, weights.key, packed.kv_heads, packed.head_dim, eps, y + keys, rstd + packed.heads);
  if (x != y) std::copy(x + values, x + packed.packed(), y + values);
}

// qkv (N, (H + 2 K) D), query_weight (D), key_weight (D) -> y like qkv, rstd (N, H + K) f32
Launch prepare_head_norm(const OpInstance& op) {
  PackedHeads packed(op.attributes);
  auto eps = static_cast<float>(op.attributes.real("eps"));
  return [packed, eps](std::span<const View> in, std::span<const View> out, const Exec&) {
    const View &x = in[0], &y = out[0], &rstd = out[1];
    std::int64_t columns = x.columns();
    HeadWeights weights = load_weights(in[1], in[2], packed.head_dim);
    for_blocks(x.rows(), kBlockRows, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
      float *x_space = scratch(kX, columns), *y_space = scratch(kY, columns),
            *rstd_space = scratch(kRstd, packed.rotated());
      for (std::int64_t row = begin; row < end; ++row) {
        float* y_row = place_row(y, row, y_space);
        norm_row(load_row(x, row, x_space), packed, weights, eps, y_row, place_row(rstd, row, rstd_space));
        if (y) store_row(y, row, y_row);
      }
    });
  };
}

// qkv, query_weight (D), key_weight (D), positions (N) i32 -> y = head_norm(qkv), rstd (N, H + K) f32, z = rope(y)
Launch prepare_head_norm_rope(const OpInstance& op) {
  PackedHeads packed(op.attributes);
  auto eps = static_cast<float>(op.attributes.real("eps"));
  DType y_dtype = op.outputs[0].dtype;
  return [packed, eps, y_dtype, table = make_rope_table(op, Rotation::forward)](
             std::span<const View> in, std::span<const View> out, const Exec&) {
    const View &x = in[0], &positions = in[3], &y = out[0], &rstd = out[1], &z = out[2];
    std::int64_t columns = x.columns();
    HeadWeights weights = load_weights(in[1], in[2], packed.head_dim);
    table->require(positions);
    for_blocks(x.rows(), kBlockRows, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
      float *x_space = scratch(kX, columns), *y_space = scratch(kY, columns);
      float *z_space = scratch(kZ, columns), *rstd_space = scratch(kRstd, packed.rotated());
      for (std::int64_t row = begin; row < end; ++row) {
        std::int64_t position = positions.as<std::int32_t>()[row];
        float* y_row = place_row(y, row, y_space);
        norm_row(load_row(x, row, x_space), packed, weights, eps, y_row, place_row(rstd, row, rstd_space));
        finish_row(y, y_dtype, row, columns, y_row);
        if (!z) continue;
        float* z_row = target_row(z, row, z_space);
        rotate_heads(y_row, table->cos(position), table->sin(position), packed.rotated(), packed.head_dim, z_row);
        std::copy(y_row + packed.values_begin(), y_row + columns, z_row + packed.values_begin());
        store_row(z, row, z_row);
      }
    });
  };
}

// dy, qkv (N, (H + 2 K) D), query_weight (D), key_weight (D), rstd (N, H + K) f32 -> dqkv, dquery_weight (D),
// dkey_weight (D)
Launch prepare_head_norm_grad(const OpInstance& op) {
  PackedHeads packed(op.attributes);
  bool accumulate_query = op.outputs[1].accumulate, accumulate_key = op.outputs[2].accumulate;
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    const View &dy = in[0], &x = in[1], &rstd = in[4], &dx = out[0], &dquery = out[1], &dkey = out[2];
    std::int64_t rows = x.rows(), columns = x.columns(), head_dim = packed.head_dim;
    HeadWeights weights = load_weights(in[2], in[3], head_dim);
    bool summed = dquery || dkey;
    ColumnSums sums(static_cast<float*>(exec.workspace), rows, 2 * head_dim);  // of the query and the key weight
    for_blocks(rows, kBlockRows, [&](std::int64_t block, std::int64_t begin, std::int64_t end) {
      float *x_space = scratch(kX, columns), *dy_space = scratch(kOther, columns), *dx_space = scratch(kY, columns);
      float* partial = summed ? sums.start(block) : nullptr;
      for (std::int64_t row = begin; row < end; ++row) {
        const float *dy_row = load_row(dy, row, dy_space), *x_row = load_row(x, row, x_space);
        const float* rstd_row = rstd.as<float>() + row * packed.rotated();
        float* dx_row = place_row(dx, row, dx_space);
        for (std::int64_t head = 0; head < packed.rotated(); ++head) {
          bool is_key = head >= packed.heads;
          std::int64_t at = head * head_dim;
          rms_grad(dy_row + at, x_row + at, is_key ? weights.key : weights.query, rstd_row[head], head_dim, dx_row + at,
                   summed ? partial + (is_key ? head_dim : 0) : nullptr);
        }
        if (dy_row != dx_row)
          std::copy(dy_row + packed.values_begin(), dy_row + columns, dx_row + packed.values_begin());
        if (dx) store_row(dx, row, dx_row);
      }
    });
    if (dquery) sums.finish(dquery, accumulate_query);
    if (dkey) sums.finish(dkey, accumulate_key, head_dim);
  };
}

OpSupport query_head_norm(const OpInstance& op, bool rotated) {
  OperandCheck check(op, rotated ? 4 : 3, rotated ? 3 : 2);
  operands::check_head_norm(check, op, rotated);
  return check.support();
}

OpSupport query_head_norm_grad(const OpInstance& op) {
  PackedHeads packed(op.attributes);
  std::int64_t rows = matrix_of(op, 1).rows;
  OperandCheck check(op, 5, 3);
  operands::check_head_norm_grad(check, op);
  bool summed = check.ok() && (op.outputs[1].present || op.outputs[2].present);
  return check.support(summed ? ColumnSums::bytes(rows, 2 * packed.head_dim) : 0);
}

}  // namespace

void add_head_norm_ops(OpTable& table) {
  table["head_norm"] = {prepare_head_norm, [](const OpInstance& op) { return query_head_norm(op, false); }};
  table["head_norm_rope"] = {prepare_head_norm_rope, [](const OpInstance& op) { return query_head_norm(op, true); }};
  table["head_norm_grad"] = {prepare_head_norm_grad, query_head_norm_grad};
}

}  // namespace quern::cpu
